"""Finds what a target can skip while it drafts for itself (Self-Speculative, arXiv 2309.08168).

Sublayers, or whole layers, are left out greedily, the least missed first: the search of n of them takes about
n²/2 passes over the prompts, and ends early once its time is over.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from outrider.lm.continuations import Continuations
from outrider.lm.load.model import load_model
from outrider.lm.load.part import ModelPart
from outrider.lm.runner import PackedLM
from outrider.pair.costs import measure
from outrider.pair.texts import prompts
from outrider.skip_set import KINDS, Kind, SkipSet, Sublayer, whole_layers, write_skips
from outrider.tokens import TokenTable
from speculative.errors import InvalidRequest, ModelRefused

MOST_DRAFTED = 12
"""Most drafted tokens of a round that the estimate considers."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """A skip set, and what the rest of the model is worth as a drafter."""

    skip: SkipSet
    acceptance: float
    """Share of the target's tokens that the rest chooses as well, given the tokens before."""
    cost: float
    """Time of a pass of the rest over the time of a pass of the whole model. Drafting pays only if the
    acceptance is above this ratio."""

    @property
    def written(self) -> tuple[str, ...]:
        """The skip set as settings write it."""
        return write_skips(self.skip)

    @property
    def speedup(self) -> float:
        """Expected speed over plain decoding, with drafts of the best length, if further rows cost
        nothing."""
        return max(speedup(self.acceptance, self.cost, count) for count in range(MOST_DRAFTED + 1))


def speedup(acceptance: float, cost: float, count: int) -> float:
    """Tokens per pass-time of a round that drafts `count` tokens at a cost of `cost` passes each."""
    tokens = sum(acceptance**depth for depth in range(count + 1))
    return tokens / (1 + cost * count)


@dataclass(frozen=True, slots=True)
class Shares:
    """What one sublayer of each kind takes of a pass of the whole model."""

    attention: float
    mlp: float

    def cost(self, skip: SkipSet) -> float:
        """Time of a pass without these sublayers over the time of a pass of the whole model."""
        skipped = sum(self.attention if kind == "attention" else self.mlp for _, kind in skip)
        return max(0.0, 1 - skipped)


def units_of(texts: Continuations, whole: bool = False) -> list[SkipSet]:
    """What is skipped at a time: a sublayer; a layer if ``whole``, or where layers have no such parts."""
    if whole or texts.whole_only:
        return [whole_layers([layer]) for layer in range(texts.layers)]
    return [frozenset([Sublayer(layer, kind)]) for layer in range(texts.layers) for kind in KINDS]


def search(
    texts: Continuations,
    units: Sequence[SkipSet],
    cost: Callable[[SkipSet], float],
    progress: Callable[[str], None] = lambda _: None,
    is_over: Callable[[], bool] = lambda: False,
) -> Iterator[Skipped]:
    """The best set found of one unit to skip, of two units and so on, until one attention is left.

    Args:
        texts: the target's continuations.
        units: what is skipped at a time.
        cost: time of a pass without a skip set over the time of the whole model's pass.
        progress: prints a line about each set.
        is_over: ends the search; called before every pass over the prompts.
    """
    skipped: SkipSet = frozenset()
    while left := [unit for unit in units if not unit & skipped and _attends(texts, skipped | unit)]:
        tried: dict[SkipSet, float] = {}
        for unit in left:
            if is_over():
                size = f"{len(skipped) // len(unit)} {'sublayers' if len(unit) == 1 else 'layers'}"
                progress(f"the time is over: sets of more than {size} were not searched")
                return
            tried[skipped | unit] = texts.acceptance(skipped | unit)
        skipped = max(tried, key=lambda skip: (tried[skip], -cost(skip), sorted(skip)))
        found = Skipped(skipped, tried[skipped], cost(skipped))
        progress(f"without {','.join(found.written)}: acceptance {found.acceptance:.0%}")
        yield found


def _attends(texts: Continuations, skip: SkipSet) -> bool:
    return sum(sublayer.kind == "attention" for sublayer in skip) < texts.layers


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
    whole: bool = False
    """Whether whole layers alone are skipped."""
    minutes: float = 10.0
    """How long the search may take."""


def find_skips(source: str, how: SkipOptions, progress: Callable[[str], None]) -> list[Skipped]:
    """Searches what a model can skip: the best set found for each number of sublayers or layers.

    Raises OutriderError for a model that cannot be served, or for a text that cannot be read.
    """
    load = partial(PackedLM.load, source, device=how.device, dtype=how.dtype, threads=how.threads)
    whole = load()
    if whole.tokenizer_json is None:
        raise InvalidRequest(f"{source!r} has no tokenizer; prompts cannot be encoded")
    ids = prompts(TokenTable.from_json(whole.tokenizer_json), how.text, how.prompts, how.prompt_ids)
    device = str(whole.model.device)
    progress("measuring passes of the model and of its parts")
    try:
        shares = measure_shares(whole, lambda part: load(part=part), in_part=not how.whole)
    except ModelRefused as refused:
        if how.whole:
            raise
        progress(str(refused))  # its layers cannot be skipped in part; anything else is refused again
        shares = measure_shares(whole, lambda part: load(part=part), in_part=False)
    del whole  # beside a part that is being loaded there is room for two models, not for three
    progress("writing the target's continuations")
    texts = Continuations(
        load_model(source, device=device, dtype=how.dtype), ids, how.tokens, how.temperature
    )
    units = units_of(texts, how.whole)
    in_part = len(units) > texts.layers
    progress(
        f"searching {len(units)} {'sublayers' if in_part else 'layers'} for at most {how.minutes:g} minutes, "
        f"with at most {len(units) * (len(units) + 1) // 2} passes over the prompts"
    )
    ends = time.monotonic() + 60 * how.minutes
    return list(search(texts, units, shares.cost, progress, lambda: time.monotonic() > ends))


def measure_shares(
    whole: PackedLM,
    load: Callable[[ModelPart], PackedLM],
    in_part: bool,
    clock: Callable[[], float] = time.perf_counter,
) -> Shares:
    """Measures what sublayers take of a pass, by passes of models without those of the second half.

    Args:
        whole: the whole model.
        load: loads a part of it.
        in_part: whether its layers can be skipped in part; if not, half a layer's share is each sublayer's.
        clock: the clock of passes; see `measure`.
    """
    layers = whole.model.config.get_text_config().num_hidden_layers
    behind = range(max(1, layers // 2), layers)

    def share(*kinds: Kind) -> float:
        skip = frozenset(Sublayer(layer, kind) for layer in behind for kind in kinds)
        if not skip:
            return 0.0
        all_of_it, without = measure(whole, load(ModelPart(skip)), clock)
        return max(0.0, 1 - without.step_ms / all_of_it.step_ms) / len(skip)

    return Shares(share("attention"), share("mlp")) if in_part else Shares(*[share(*KINDS)] * 2)
