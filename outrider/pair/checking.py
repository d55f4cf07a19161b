"""Checks a pair: whether both models load and their tokenizers fit, what drafting gains, what to set.

The check finds and names what a service would refuse, without starting one. Acceptance is that of the real
drafter's trees on the target's own continuations; time is simulated from the costs of both models on this
machine (`outrider.pair.simulation`).
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

from drafter_service.drafters.causal_lm import CausalLMDrafter
from outrider.lm.chains.fallback import trees_or_chains
from outrider.lm.load.source import ModelSource
from outrider.lm.plan import SequenceRows
from outrider.lm.runner import PackedLM
from outrider.pair.advice import Advice, Drafting, advise, kv_mb
from outrider.pair.beforehand import tokenizer_difference
from outrider.pair.costs import Cost, measure
from outrider.pair.search import DrafterTuning, FoundTuning, search_tuning
from outrider.pair.simulation import Scene, Simulation, Tally, Truth, continuation
from outrider.pair.texts import prompts
from outrider.pair.tokenizers import Fit, fit
from outrider.tokens import TokenTable
from speculative.errors import ModelRefused
from speculative.params import SamplingParams

TEMPERATURES = (0.0, 0.8)
NODES = (4, 8, 16)
"""Limits of nodes to measure."""
KV_MB = 1024
DEFAULT_TUNING = DrafterTuning()

Progress = Callable[[str], None]
"""Prints a line about the step that begins."""


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """Prompts to measure with, and number format, device and threads to compute with."""

    dtype: str = "float32"
    device: str = "cpu"
    threads: int = 1
    text: Path | None = None
    """File with text to continue; None: built-in prompts."""
    prompts: int = 8
    tokens: int = 48
    """Number of tokens to generate for each prompt."""
    prompt_ids: int = 128
    """Largest number of tokens of a prompt."""
    search: bool = False
    """Whether to search the drafter's children, scale and width too."""


@dataclass(frozen=True, slots=True)
class Side:
    """One model of the pair."""

    source: str
    refusal: str = ""
    """Reason why the model cannot be served; empty where it loads."""
    type: str = ""
    max_length: int = 0
    vocabulary_size: int = 0
    kv_bytes_per_id: int = 0
    shape: str = ""
    """What a pass verifies: ``trees``, ``chains``, or ``chains by rows``, where drafts save no time; empty
    where the model is not loaded."""

    @property
    def chains(self) -> bool:
        """Whether the model verifies no branches."""
        return self.shape.startswith("chains")


@dataclass(slots=True)
class Report:
    """The result of a check."""

    how: CheckOptions
    target: Side
    drafter: Side
    tokenizers: Fit
    costs: tuple[Cost, Cost] | None = None
    """Costs of the target and of the drafter."""
    agreement: float = 0.0
    """Share of the target's greedy tokens that are the drafter's likeliest token at their position."""
    prompts: int = 0
    measured: list[Drafting] = field(default_factory=list)
    advice: Advice = field(default_factory=lambda: advise([]))
    found: FoundTuning | None = None
    """The drafter's fastest settings; None where they were not searched, or no drafter is recommended."""

    @property
    def fits(self) -> bool:
        """Whether the two models can be served together."""
        return self.tokenizers.ok and not self.target.refusal and not self.drafter.refusal

    def settings(self) -> dict[str, dict[str, Any]]:
        """Recommended tables of a configuration file; empty where the target is refused."""
        if self.target.refusal:
            return {}
        common = {"dtype": self.how.dtype, "device": self.how.device, "threads": self.how.threads}
        found = {"verifier": {"model": self.target.source, **common}}
        if not self.target.chains:  # states take memory that no count of ids tells
            found["verifier"]["kv_mb"] = _room(self.target)
        if self.advice.drafter:
            found["verifier"]["node_limit"] = self.advice.nodes
            found["drafter"] = {"model": self.drafter.source, **common, "kv_mb": _room(self.drafter)}
            if self.found is not None:
                found["drafter"] |= self.found.tuning.as_object()
        return found

    def as_object(self) -> dict[str, Any]:
        """The report as JSON prints it; docs/models-check.schema.json describes the object."""
        costs = None
        if self.costs is not None:
            target, drafter = self.costs
            ratio = round(drafter.step_ms / target.step_ms, 4)
            costs = {"target": asdict(target), "drafter": asdict(drafter), "drafter_to_target": ratio}
        how = asdict(self.how) | {"text": None if self.how.text is None else str(self.how.text)}
        return {
            "fits": self.fits,
            "target": asdict(self.target),
            "drafter": asdict(self.drafter),
            "tokenizers": asdict(self.tokenizers),
            "costs": costs,
            "agreement": self.agreement if self.measured else None,
            "acceptance": [asdict(one) for one in self.measured],
            "how": how | {"prompts": self.prompts},
            "advice": self.advice.as_object(),
            "search": None if self.found is None else asdict(self.found),
            "settings": self.settings(),
        }


def check(target: str, drafter: str, how: CheckOptions, progress: Progress) -> Report:
    """Loads both models in turn, and measures the pair where they fit.

    Raises InvalidRequest where a model or the text does not exist. A missing model, and tokenizers that
    differ, are found before a model is loaded.
    """
    found = [Side(source, type=_find(source)) for source in (target, drafter)]
    if difference := tokenizer_difference(target, drafter):
        return Report(how, found[0], found[1], Fit(False, difference))
    progress(f"loading {target}")
    big, target_side = _load(target, how, trees_or_chains)
    progress(f"loading {drafter}")
    small, drafter_side = _load(drafter, how, lambda _, load: load(PackedLM))
    fitting = _fit(big, small)
    report = Report(how, target_side, drafter_side, fitting)
    if big is not None and small is not None and fitting.ok:
        _measure(report, big, small, progress)
    return report


def _find(source: str) -> str:
    """The model's type. Raises InvalidRequest where it has no configuration, or its folder lacks weights."""
    where = ModelSource.of(source)
    config = where.read_config()
    where.check_whole()
    return str(config.get("model_type", ""))


def _load(
    source: str, how: CheckOptions, choose: Callable[[str, Callable[[type[PackedLM]], PackedLM]], PackedLM]
) -> tuple[PackedLM | None, Side]:
    """A model as its service loads it. `choose` tries the kinds of passes that the service has."""

    def load(kind: type[PackedLM]) -> PackedLM:
        return kind.load(source, device=how.device, dtype=how.dtype, threads=how.threads, kv_mb=KV_MB)

    try:
        lm = choose(source, load)
    except ModelRefused as error:
        return None, Side(source, refusal=str(error))
    return lm, Side(
        source,
        type=lm.model_type,
        max_length=lm.max_length,
        vocabulary_size=lm.vocabulary_size,
        kv_bytes_per_id=lm.pool.layout.slot_bytes,
        shape=lm.passes if lm.pool.chains_only else "trees",
    )


def _fit(big: PackedLM | None, small: PackedLM | None) -> Fit:
    """Compares the tokenizers of both models; a refused model fits nothing."""
    if big is None or small is None:
        return Fit(False, "not compared: a model was refused")
    return fit(_tokens(big), _tokens(small))


def _tokens(lm: PackedLM) -> TokenTable | None:
    return None if lm.tokenizer_json is None else TokenTable.from_json(lm.tokenizer_json)


def _measure(report: Report, big: PackedLM, small: PackedLM, progress: Progress) -> None:
    how, table = report.how, _tokens(big)
    assert table is not None, "tokenizers that fit exist"
    shortest = min(big.max_length, small.max_length)
    how = replace(how, tokens=max(1, min(how.tokens, shortest // 2)))
    given = prompts(table, how.text, how.prompts, max(1, min(how.prompt_ids, shortest - how.tokens - 1)))
    progress("timing passes")
    costs = measure(big, small)
    model = CausalLMDrafter(small)
    answers: dict[float, list[Truth]] = {}
    for temperature in TEMPERATURES:
        progress(f"continuing {len(given)} prompts by {how.tokens} ids at temperature {temperature:g}")
        params = SamplingParams(temperature=temperature)
        truths = [continuation(big, ids, params, seed, how.tokens) for seed, ids in enumerate(given)]
        answers[temperature] = truths
        if params.greedy:
            report.agreement = _agreement(small, truths)
        for nodes in NODES:
            report.measured.append(
                _draft(model, truths, temperature, nodes, costs, chains=report.target.chains)
            )
    report.how, report.costs, report.prompts = how, costs, len(given)
    report.advice = advise(report.measured)
    if how.search and report.advice.drafter:
        report.found = _search(
            model, answers, report.advice.nodes, costs, progress, chains=report.target.chains
        )


def _search(
    model: CausalLMDrafter,
    answers: Mapping[float, Sequence[Truth]],
    nodes: int,
    costs: tuple[Cost, Cost],
    progress: Progress,
    *,
    chains: bool,
) -> FoundTuning:
    """The fastest settings of the drafter for these answers, by temperature, with `nodes` nodes a round."""

    def measure(tuning: DrafterTuning) -> float:
        progress(f"trying {', '.join(f'{name} {value:g}' for name, value in tuning.as_object().items())}")
        return prod(
            _draft(model, truths, temperature, nodes, costs, tuning, chains=chains).expected_speedup
            for temperature, truths in answers.items()
        ) ** (1 / len(answers))

    return search_tuning(measure)


def _draft(
    model: CausalLMDrafter,
    truths: Sequence[Truth],
    temperature: float,
    nodes: int,
    costs: tuple[Cost, Cost],
    tuning: DrafterTuning = DEFAULT_TUNING,
    *,
    chains: bool,
) -> Drafting:
    target, drafter = costs
    scene = Scene(
        target_step=target.step_ms,
        target_row=target.row_ms,
        drafter_step=drafter.step_ms,
        drafter_row=drafter.row_ms,
        node_limit=nodes,
        nodes_per_pass=tuning.nodes_per_pass,
        chains=chains,
    )
    tally = Tally()
    for truth in truths:
        Simulation(model, truth, tuning.growth, scene, tally).run()
    plain_ms = tally.tokens * (scene.target_step + scene.between)
    return Drafting(temperature, nodes, round(tally.tokens / tally.rounds, 3), round(plain_ms / tally.ms, 3))


def _agreement(lm: PackedLM, truths: Sequence[Truth]) -> float:
    """Share of the greedy tokens that are the drafter's likeliest, by one pass over each continuation."""
    right = count = 0
    for truth in truths:
        ids, begin = truth.ids[:-1], truth.prompt_length - 1
        table = lm.table()
        outcome = lm.forward([SequenceRows(table, ids, range(-1, len(ids) - 1), range(begin, len(ids)))])
        lm.release(table)
        expected = truth.ids[truth.prompt_length :]
        right += sum(int(row.argmax()) == id_ for row, id_ in zip(outcome.rows(), expected, strict=True))
        count += len(expected)
    return round(right / max(1, count), 4)


def _room(side: Side) -> int:
    memory_mb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20
    return kv_mb(side.kv_bytes_per_id, side.max_length, memory_mb)
