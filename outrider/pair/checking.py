"""Checks a pair: do both load, do the tokenizers fit, what is drafting worth, what should be set.

What a service would refuse is found and named here, without one. Acceptance is that of the real drafter's
trees on the target's own continuations; time is simulated with the costs that both models have on this
machine (`outrider.pair.simulation`).
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from drafter_service.draft_tree import Growth
from drafter_service.drafters.causal_lm import CausalLMDrafter
from outrider.lm.load.source import ModelSource
from outrider.lm.plan import SequenceRows
from outrider.lm.runner import PackedLM
from outrider.pair.advice import Advice, Drafting, advise, kv_mb
from outrider.pair.costs import Cost, measure
from outrider.pair.simulation import Scene, Simulation, Tally, Truth, continuation
from outrider.pair.texts import prompts
from outrider.pair.tokenizers import Fit, fit
from outrider.tokens import TokenTable
from speculative.errors import ModelRefused
from speculative.params import SamplingParams

TEMPERATURES = (0.0, 0.8)
NODES = (4, 8, 16)
KV_MB = 1024

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """What is measured, and on what."""

    dtype: str = "float32"
    device: str = "cpu"
    threads: int = 1
    text: Path | None = None
    """Default: a few prompts of our own."""
    prompts: int = 8
    tokens: int = 48
    """Ids that each prompt is continued by."""
    prompt_ids: int = 128
    """Ids of a prompt, at most."""


@dataclass(frozen=True, slots=True)
class Side:
    """One model of the pair."""

    source: str
    refusal: str = ""
    """Why it is not served; empty where it passed the check at load."""
    type: str = ""
    max_length: int = 0
    vocabulary_size: int = 0
    kv_bytes_per_id: int = 0


@dataclass(slots=True)
class Report:
    """What was found out."""

    how: CheckOptions
    target: Side
    drafter: Side
    tokenizers: Fit
    costs: tuple[Cost, Cost] | None = None
    """Of the target and of the drafter."""
    agreement: float = 0.0
    """The share of the target's greedy tokens that are the drafter's likeliest, given the ids before."""
    prompts: int = 0
    measured: list[Drafting] = field(default_factory=list)
    advice: Advice = field(default_factory=lambda: advise([]))

    @property
    def fits(self) -> bool:
        """Whether the two can be served together."""
        return self.tokenizers.ok and not self.target.refusal and not self.drafter.refusal

    def settings(self) -> dict[str, dict[str, Any]]:
        """Tables of a configuration file; empty where there is nothing to recommend."""
        if self.target.refusal:
            return {}
        common = {"dtype": self.how.dtype, "device": self.how.device, "threads": self.how.threads}
        found = {"verifier": {"model": self.target.source, **common, "kv_mb": _room(self.target)}}
        if self.advice.drafter:
            found["verifier"]["node_limit"] = self.advice.nodes
            found["drafter"] = {"model": self.drafter.source, **common, "kv_mb": _room(self.drafter)}
        return found

    def as_object(self) -> dict[str, Any]:
        """For JSON; docs/models-check.schema.json describes it."""
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
            "settings": self.settings(),
        }


def check(target: str, drafter: str, how: CheckOptions, tell: Tell) -> Report:
    """Loads both, one after the other, and measures what can be measured.

    Raises InvalidRequest where there is no such model, or no such text: then nothing can be said. That one of
    them is not there is found before the other is loaded.
    """
    for source in (target, drafter):
        _find(source)
    tell(f"loading {target}")
    big, target_side = _load(target, how)
    tell(f"loading {drafter}")
    small, drafter_side = _load(drafter, how)
    fitting = _fit(big, small)
    report = Report(how, target_side, drafter_side, fitting)
    if big is not None and small is not None and fitting.ok:
        _measure(report, big, small, tell)
    return report


def _find(source: str) -> None:
    """Raises InvalidRequest where it has no configuration, or a folder not all of its weights."""
    where = ModelSource.of(source)
    where.read_config()
    where.check_whole()


def _load(source: str, how: CheckOptions) -> tuple[PackedLM | None, Side]:
    try:
        lm = PackedLM.load(source, device=how.device, dtype=how.dtype, threads=how.threads, kv_mb=KV_MB)
    except ModelRefused as error:
        return None, Side(source, refusal=str(error))
    return lm, Side(
        source,
        type=lm.model_type,
        max_length=lm.max_length,
        vocabulary_size=lm.vocabulary_size,
        kv_bytes_per_id=lm.pool.layout.slot_bytes,
    )


def _fit(big: PackedLM | None, small: PackedLM | None) -> Fit:
    """Of models that were refused nothing is known."""
    if big is None or small is None:
        return Fit(False, "not compared: a model was refused")
    return fit(_tokens(big), _tokens(small))


def _tokens(lm: PackedLM) -> TokenTable | None:
    return None if lm.tokenizer_json is None else TokenTable.from_json(lm.tokenizer_json)


def _measure(report: Report, big: PackedLM, small: PackedLM, tell: Tell) -> None:
    how, table = report.how, _tokens(big)
    assert table is not None, "tokenizers that fit are there"
    shortest = min(big.max_length, small.max_length)
    how = replace(how, tokens=max(1, min(how.tokens, shortest // 2)))
    given = prompts(table, how.text, how.prompts, max(1, min(how.prompt_ids, shortest - how.tokens - 1)))
    tell("timing passes")
    costs = measure(big, small)
    model = CausalLMDrafter(small)
    for temperature in TEMPERATURES:
        tell(f"continuing {len(given)} prompts by {how.tokens} ids at temperature {temperature:g}")
        params = SamplingParams(temperature=temperature)
        truths = [continuation(big, ids, params, seed, how.tokens) for seed, ids in enumerate(given)]
        if params.greedy:
            report.agreement = _agreement(small, truths)
        for nodes in NODES:
            report.measured.append(_draft(model, truths, temperature, nodes, costs))
    report.how, report.costs, report.prompts = how, costs, len(given)
    report.advice = advise(report.measured)


def _draft(
    model: CausalLMDrafter, truths: Sequence[Truth], temperature: float, nodes: int, costs: tuple[Cost, Cost]
) -> Drafting:
    target, drafter = costs
    scene = Scene(
        target_step=target.step_ms,
        target_row=target.row_ms,
        drafter_step=drafter.step_ms,
        drafter_row=drafter.row_ms,
        node_limit=nodes,
    )
    tally = Tally()
    for truth in truths:
        Simulation(model, truth, Growth(), scene, tally).run()
    plain_ms = tally.tokens * (scene.target_step + scene.between)
    return Drafting(temperature, nodes, round(tally.tokens / tally.rounds, 3), round(plain_ms / tally.ms, 3))


def _agreement(lm: PackedLM, truths: Sequence[Truth]) -> float:
    """One pass over each whole continuation."""
    right = count = 0
    for truth in truths:
        ids, begin = truth.ids[:-1], truth.prompt_length - 1
        table = lm.table()
        logits = lm.forward([SequenceRows(table, ids, range(-1, len(ids) - 1), range(begin, len(ids)))])
        lm.release(table)
        expected = truth.ids[truth.prompt_length :]
        right += sum(int(row.argmax()) == id_ for row, id_ in zip(logits, expected, strict=True))
        count += len(expected)
    return round(right / max(1, count), 4)


def _room(side: Side) -> int:
    memory_mb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20
    return kv_mb(side.kv_bytes_per_id, side.max_length, memory_mb)
