"""Finds layers that a target can skip while it drafts for itself (Self-Speculative, arXiv 2309.08168).

Layers are left out greedily, the least missed first: the search of a model of L layers takes about L²/2
passes over the prompts.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from outrider.lm.continuations import Continuations
from outrider.lm.load.model import load_model
from outrider.lm.load.part import ModelPart
from outrider.lm.runner import PackedLM
from outrider.pair.costs import Cost, measure
from outrider.pair.texts import prompts
from outrider.tokens import TokenTable
from speculative.errors import InvalidRequest

MOST_DRAFTED = 12
"""Most drafted tokens of a round that the estimate considers."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """A set of layers to skip, and what the other layers are worth as a drafter."""

    layers: tuple[int, ...]
    acceptance: float
    """Share of the target's tokens that the other layers choose as well, given the tokens before."""
    cost: float
    """Time of a pass of the other layers over the time of a pass of the whole model. Drafting pays only if
    the acceptance is above this ratio."""

    @property
    def speedup(self) -> float:
        """Expected speed over plain decoding, with drafts of the best length, if further rows cost
        nothing."""
        return max(speedup(self.acceptance, self.cost, count) for count in range(MOST_DRAFTED + 1))


def speedup(acceptance: float, cost: float, count: int) -> float:
    """Tokens per pass-time of a round that drafts `count` tokens at a cost of `cost` passes each."""
    tokens = sum(acceptance**depth for depth in range(count + 1))
    return tokens / (1 + cost * count)


def search(
    texts: Continuations,
    cost_of: Callable[[int], float],
    progress: Callable[[str], None] = lambda _: None,
) -> Iterator[Skipped]:
    """The best set found of one layer to skip, of two layers and so on, to all but one.

    Args:
        texts: the target's continuations.
        cost_of: time of a pass of a number of layers over the time of the whole model's pass.
        progress: prints a line about each set.
    """
    skipped: tuple[int, ...] = ()
    while len(skipped) < texts.layers - 1:
        left = [layer for layer in range(texts.layers) if layer not in skipped]
        tried = {layer: texts.acceptance((*skipped, layer)) for layer in left}
        best = max(tried, key=lambda layer: (tried[layer], layer))
        skipped = tuple(sorted((*skipped, best)))
        found = Skipped(skipped, tried[best], cost_of(texts.layers - len(skipped)))
        progress(f"without layers {','.join(map(str, skipped))}: acceptance {found.acceptance:.0%}")
        yield found


@dataclass(frozen=True, slots=True)
class SkipOptions:
    """Settings of a search: its text, its size, and the device."""

    dtype: str = "float32"
    device: str = "cpu"
    threads: int = 1
    text: Path | None = None
    """File with text to continue; None: built-in prompts."""
    prompts: int = 8
    tokens: int = 48
    """Number of tokens to write for each prompt."""
    prompt_ids: int = 128
    """Largest number of tokens of a prompt."""
    temperature: float = 0.0


def find_skips(source: str, how: SkipOptions, progress: Callable[[str], None]) -> list[Skipped]:
    """Searches the sets of layers that a model can skip, one for each number of layers.

    Raises OutriderError for a model that cannot be served, or for a text that cannot be read.
    """
    progress("measuring passes of the model and of half of it")
    whole = PackedLM.load(source, device=how.device, dtype=how.dtype, threads=how.threads)
    layers = whole.model.config.get_text_config().num_hidden_layers
    part = ModelPart(first=max(1, layers // 2))
    half = PackedLM.load(source, device=how.device, dtype=how.dtype, threads=how.threads, part=part)
    cost_of = partial(linear_cost, layers, part.first, measured=measure(whole, half))
    if whole.tokenizer_json is None:
        raise InvalidRequest(f"{source!r} has no tokenizer; prompts cannot be encoded")
    ids = prompts(TokenTable.from_json(whole.tokenizer_json), how.text, how.prompts, how.prompt_ids)
    progress("writing the target's continuations")
    model = load_model(source, device=str(whole.model.device), dtype=how.dtype)
    texts = Continuations(model, ids, how.tokens, how.temperature)
    return list(search(texts, cost_of, progress))


def linear_cost(layers: int, half: int, kept: int, *, measured: tuple[Cost, Cost]) -> float:
    """Estimated time of a pass of `kept` layers over a pass of all, from a measured pass of `half` of
    them."""
    whole_ms, half_ms = (cost.step_ms for cost in measured)
    each_ms = max(0.0, whole_ms - half_ms) / max(1, layers - half)
    return (half_ms + (kept - half) * each_ms) / whole_ms
