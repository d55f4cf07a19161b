"""How large a Generate may be: as large as the largest legal request to the models served now."""

from collections.abc import Sequence

from orchestrator.fleet.target_model import TargetModel
from outrider.wire.codec import MAX_CHOICES
from outrider.wire.incoming.shape import MOST_NUMBERS, SMALL_BYTES, Bounds
from speculative.params import MAX_BIAS_ENTRIES
from speculative.request_bounds import MAX_SCHEMA_BYTES
from speculative.stop import MAX_STOP_BYTES, MAX_STOPS

LEAST_TOKEN_BYTES = 64
"""A text is refused before it is tokenized only where tokens of this many bytes each would not fit the
context: the text of a special token, or text that the tokenizer normalises away, may be longer than any
token's bytes."""
ID_BYTES = 5
"""The most bytes of a token id on the wire."""
BIAS_BYTES = 20
"""The most bytes of an entry of `logit_bias` on the wire."""
STRING_BYTES = 8
"""The most bytes that stand before a string's own on the wire."""


def most_text_bytes(target: TargetModel) -> int:
    """The most bytes of text that could fit the target's context; 0 without a tokenizer."""
    if target.tokens is None:
        return 0
    return target.max_length * max(target.tokens.longest_token_bytes, LEAST_TOKEN_BYTES)


def generate_bounds(targets: Sequence[TargetModel]) -> Bounds:
    """Bounds of a Generate whose model is not known yet: those of the model that allows the largest one.

    A request has a prompt (text or token ids), a prediction, `have` for each choice, and fields of a fixed
    size at most.
    """
    longest = max((target.max_length for target in targets), default=0)
    text = max(map(most_text_bytes, targets), default=0)
    have = MAX_CHOICES * longest * ID_BYTES
    stops = MAX_STOPS * (MAX_STOP_BYTES + STRING_BYTES)
    fixed = MAX_BIAS_ENTRIES * BIAS_BYTES + stops + MAX_SCHEMA_BYTES + SMALL_BYTES
    numbers = (1 + MAX_CHOICES) * longest + SMALL_BYTES // ID_BYTES
    return Bounds(
        most_bytes=max(text, longest * ID_BYTES) + text + have + fixed,
        most_numbers=min(numbers, MOST_NUMBERS),
        because=f"no request to a context of {longest} tokens is larger",
    )
