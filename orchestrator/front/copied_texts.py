"""The texts that an answer may copy from, as token ids: a request's prediction and its references.

All of them together have to be shorter than the target's context, so an Open has no more than two contexts of
token ids. Sizes are checked before anything is tokenized.
"""

import asyncio
import re
from collections.abc import Sequence
from typing import NamedTuple

from orchestrator.fleet.target_model import TargetModel
from orchestrator.front.message_bounds import most_text_bytes
from outrider.tokens import TokenTable, TooManyTokens
from outrider.wire.names import MAX_REFERENCES
from speculative.errors import InvalidRequest

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})([^\n]*)")
"""The line before or behind a block of code in Markdown."""


class CopiedTexts(NamedTuple):
    """Token ids of the texts that an answer may copy from."""

    prediction: tuple[int, ...] = ()
    """The client's prediction of the answer; empty: there is none."""
    references: tuple[tuple[int, ...], ...] = ()


NO_TEXTS = CopiedTexts()


async def encode_copied(prediction: str, references: Sequence[str], target: TargetModel) -> CopiedTexts:
    """Token ids of a prediction and of references; empty texts are left out. Tokenizes in a thread.

    Raises InvalidRequest for too many references, or texts that together are too long.
    """
    if len(references) > MAX_REFERENCES:
        raise InvalidRequest(f"references has {len(references)} texts; at most {MAX_REFERENCES} are possible")
    named = {"prediction": prediction} | {f"references[{at}]": text for at, text in enumerate(references)}
    texts = {name: text for name, text in named.items() if text}
    if not texts:
        return NO_TEXTS
    tokens = _tokens(next(iter(texts)), target)
    _check_size(texts, most_text_bytes(target), target.max_length)
    ids = await asyncio.to_thread(_encode, texts, tokens, target.max_length)
    return CopiedTexts(ids.pop("prediction", ()), tuple(ids.values()))


async def with_document(copied: CopiedTexts, prompt: str, target: TargetModel) -> CopiedTexts:
    """The texts with the prompt's last document as a further reference. Tokenizes in a thread.

    Raises InvalidRequest where there is no room for the document.
    """
    if len(copied.references) == MAX_REFERENCES:
        raise InvalidRequest(
            f"speculation.edit is true, which adds a reference to the {MAX_REFERENCES} given; at most "
            f"{MAX_REFERENCES} are possible"
        )
    tokens = _tokens("speculation.edit", target)
    used = len(copied.prediction) + sum(map(len, copied.references))
    document = {"speculation.edit": await asyncio.to_thread(last_document, prompt)}
    ids = await asyncio.to_thread(_encode, document, tokens, target.max_length, used)
    return CopiedTexts(copied.prediction, (*copied.references, *ids.values()))


def _tokens(name: str, target: TargetModel) -> TokenTable:
    if target.tokens is None:
        raise InvalidRequest(f"{name} cannot be used: model {target.name!r} has no tokenizer")
    return target.tokens


def _check_size(texts: dict[str, str], most_bytes: int, context: int) -> None:
    """Raises InvalidRequest for texts that could not fit the context together, before they are tokenized.

    Args:
        texts: by the name that the refusal gives them.
        most_bytes: the most bytes of text that could fit the context.
        context: the context's length in tokens.
    """
    total, unit = sum(map(len, texts.values())), "characters"
    # Characters are counted first: their number is known, the number of bytes is not.
    if total <= most_bytes:
        total, unit = sum(len(text.encode()) for text in texts.values()), "bytes"
    if total > most_bytes:
        longest = max(texts, key=lambda name: len(texts[name]))
        together = "" if len(texts) == 1 else f", {total} {unit} together with the other texts to copy from"
        size = len(texts[longest]) if unit == "characters" else len(texts[longest].encode())
        raise InvalidRequest(
            f"{longest} has {size} {unit}{together}, more than the context of {context} ids can hold "
            f"(at most {most_bytes} bytes)"
        )


def last_document(prompt: str) -> str:
    """The text within the prompt's last pair of lines of ``` or ~~~; the whole prompt where it has none."""
    opened, start = "", 0
    found = prompt
    at = 0
    for line in prompt.splitlines(keepends=True):
        fence = _FENCE.match(line)
        if fence and opened and fence[1].startswith(opened) and not fence[2].strip():
            found, opened = prompt[start:at], ""
        elif fence and not opened:
            opened, start = fence[1], at + len(line)
        at += len(line)
    return found


def _encode(
    texts: dict[str, str], tokens: TokenTable, context: int, used: int = 0
) -> dict[str, tuple[int, ...]]:
    """The ids of each text by its name. Raises InvalidRequest where all of them fill the context.

    `used` is the number of ids of other texts.
    """
    encoded: dict[str, tuple[int, ...]] = {}
    for name, text in texts.items():
        try:
            encoded[name] = tuple(tokens.encode(text, add_special=False, most=context - 1 - used))
        except TooManyTokens as error:
            others = f" beside {used} ids of the other texts to copy from" if used else ""
            raise InvalidRequest(
                f"{name} has at least {error.count} ids{others}; all of them together have fewer than "
                f"{context}, the target's context"
            ) from None
        used += len(encoded[name])
    return encoded
