"""X17: which rule accepts most? Every rule judges drafts behind the same places of the target's own texts.

Rules of one law differ in the texts that they write, so whole runs would compare texts as well. Here each
rule plays one round behind each place, with several draws, and the text goes on as the target wrote it.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from benchmarks.criteria import Arm, Drafting, Model
from benchmarks.experiments.experiment import Experiment, Judged, Rows, line, where
from benchmarks.experiments.pair import ModelPair, Scale
from benchmarks.plots.curves import Panel
from benchmarks.shared.resumable import Key
from outrider.pair.simulation import Truth
from speculative.acceptance.criterion import KeyedChance
from speculative.acceptance.drawn import Drawn
from speculative.acceptance.path_match import path_match
from speculative.digest import HostDigest
from speculative.history import History
from speculative.noise import NoiseRows
from speculative.params import SamplingParams
from speculative.target_sampler import TargetSampler
from speculative.tree import TokenTree

TEMPERATURES = (0.3, 0.7, 1.0)
CHAIN, TREE = (1, 1, 1, 1, 1), (4, 1, 1, 1)
STEP = {False: 8, True: 4}
"""Tokens between two places of a text, by whether the experiment is run in full."""
DRAWS, CHANCES = 2, 8
"""Windows behind a place, and random decisions about each; a decision costs no pass."""
MATCH, PLAIN = "match", "match, likeliest tokens"


class Window(NamedTuple):
    """One way to draft, and the rules that judge its drafts."""

    shape: tuple[int, ...]
    arm: Arm
    rules: tuple[str, ...]
    with_noise: bool = True


WINDOWS = (
    Window(CHAIN, Arm("ratio", CHAIN), ("ratio", "block")),
    Window(CHAIN, Arm("path_match", CHAIN), (MATCH,)),
    Window(CHAIN, Arm("path_match", CHAIN), (PLAIN,), False),
    Window(TREE, Arm("multi_step", TREE), ("multi_step", "k_seq")),
    Window(TREE, Arm("without_replacement", TREE, distinct=True), ("without_replacement",)),
    Window(TREE, Arm("path_match", TREE), (MATCH,)),
    Window(TREE, Arm("path_match", TREE), (PLAIN,), False),
)
CHAIN_RULES, TREE_RULES = (
    tuple(rule for window in WINDOWS if window.shape == shape for rule in window.rules)
    for shape in (CHAIN, TREE)
)


class Walker:
    """Drafts windows behind one place of a text after the other.

    Args:
        pair: the models.
        text: the text; its own seed is not used.
        window: how to draft.
        seed: of the draws and of the noise.
    """

    def __init__(self, pair: ModelPair, text: Truth, window: Window, seed: int) -> None:
        self.window, self.seed = window, seed
        self._prompt = text.prompt_length
        self._model = Model(pair.drafter)
        params = text.params if window.with_noise else SamplingParams(temperature=0.0)
        self._drafting = Drafting(self._model, params, window.arm, seed)

    def at(self, ids: Sequence[int]) -> tuple[TokenTree, Drawn]:
        """The drafts behind these ids, which are longer than those of the call before."""
        return self._drafting.window(list(ids), self._prompt)

    def close(self) -> None:
        """Gives the keys and values back."""
        self._model.table.close()


def keys(scale: Scale) -> list[Key]:
    """An arm for each temperature; all rules are measured on its texts."""
    return [(temperature,) for temperature in TEMPERATURES]


def measure(pair: ModelPair, key: Key) -> dict[str, Any]:
    """Mean accepted tokens of each rule, and the standard error of its difference from the match."""
    temperature = float(key[0])
    chain: dict[str, list[float]] = {rule: [] for rule in CHAIN_RULES}
    tree: dict[str, list[float]] = {rule: [] for rule in TREE_RULES}
    for text in pair.texts(temperature):
        for shape, rule, accepted in accepted_along(pair, text):
            (chain if shape == CHAIN else tree)[rule].append(accepted)
    return {
        "temperature": temperature,
        "places": len(chain[MATCH]),
        "chain": means(chain),
        "tree": means(tree),
        "chain_error": errors(chain),
        "tree_error": errors(tree),
    }


def means(found: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Mean of each rule."""
    return {rule: round(float(np.mean(each)), 4) for rule, each in found.items()}


def errors(found: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Standard error of the mean difference between each rule and the match, place by place."""
    base = np.array(found[MATCH])
    return {
        rule: round(float((np.array(each) - base).std(ddof=1) / np.sqrt(len(base))), 4)
        for rule, each in found.items()
        if rule != MATCH
    }


def accepted_along(pair: ModelPair, text: Truth) -> Iterator[tuple[tuple[int, ...], str, float]]:
    """Shape, rule, and accepted tokens of a round behind each place, averaged over the draws."""
    target = Model(pair.target)
    walkers = [[Walker(pair, text, window, 7000 + draw) for draw in range(DRAWS)] for window in WINDOWS]
    try:
        for length in range(text.prompt_length + 1, len(text.ids), STEP[pair.scale.is_full]):
            ids = text.ids[:length]
            behind = len(ids) - 1 - target.table.length
            target.read(ids[:-1])
            target.table.keep(tuple(range(behind)))
            for drawers in walkers:
                counts: dict[str, list[float]] = {rule: [] for rule in drawers[0].window.rules}
                for drawer in drawers:
                    for rule, count in judged(target, text, ids, drawer).items():
                        counts[rule].append(count)
                for rule, each in counts.items():
                    yield drawers[0].window.shape, rule, float(np.mean(each))
    finally:
        target.table.close()
        for drawer in (each for drawers in walkers for each in drawers):
            drawer.close()


def judged(target: Model, text: Truth, ids: Sequence[int], drawer: Walker) -> dict[str, float]:
    """Accepted tokens of one round by each rule of the window, on the same drafts and the same pass."""
    tree, drawn = drawer.at(ids)
    rows = target.read(ids, tree)
    target.table.drop_nodes()
    counts = {}
    for rule in drawer.window.rules:
        sampler = TargetSampler(
            text.params,
            History.of(ids, text.prompt_length),
            NoiseRows(drawer.seed, target.lm.vocabulary_size),
            len(ids),
            partial(_digest, rows),
        )
        criterion = Arm(rule).criterion
        if criterion is None:
            counts[rule] = float(len(path_match(tree, sampler).path))
            continue
        seeds = range(drawer.seed * CHANCES, (drawer.seed + 1) * CHANCES)
        matches = [criterion(tree, sampler, drawn, KeyedChance(seed, len(ids))) for seed in seeds]
        counts[rule] = float(np.mean([len(match.path) for match in matches]))
    return counts


def _digest(rows: np.ndarray[Any, np.dtype[np.float32]], node: int) -> HostDigest:
    return HostDigest(rows[node + 1])


def judge(rows: Rows) -> Sequence[Judged]:
    """Holds the predictions against the rows."""
    over = [row["chain"]["block"] / row["chain"]["ratio"] for row in rows]
    noise = [row["chain"][MATCH] / row["chain"]["ratio"] for row in rows]
    plain = [row["chain"][PLAIN] / row["chain"][MATCH] for row in rows]
    tree = [row["tree"][MATCH] / row["tree"]["without_replacement"] for row in rows]
    return (
        Judged(f"{_each(over)} of the ratio rule's accepted tokens", all(1 <= one <= 1.08 for one in over)),
        Judged(f"{_each(noise)} of the ratio rule's", all(0.9 <= one <= 0.97 for one in noise)),
        Judged(f"{_each(plain)} of the match with noise", plain[-1] < 0.7),
        Judged(f"{_each(tree)} of the rule without replacement's", all(abs(one - 1) <= 0.05 for one in tree)),
    )


def _each(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.3f}" for value in values)


def panels(rows: Rows) -> Sequence[Panel]:
    """Accepted tokens over temperature, a line for each rule."""
    ordered = [row for temperature in TEMPERATURES for row in where(rows, temperature=temperature)]
    return [
        Panel(
            title,
            "temperature",
            "accepted tokens a round",
            tuple(
                line(rule, [{"x": row["temperature"], "y": row[shape][rule]} for row in ordered], "x", "y")
                for rule in rules
            ),
        )
        for title, shape, rules in (
            (f"Chain of {len(CHAIN)}", "chain", CHAIN_RULES),
            ("Tree of 16 nodes, 4 branches", "tree", TREE_RULES),
        )
    ]


X17 = Experiment(
    name="X17",
    question="Which lossless rule accepts most?",
    predictions=(
        "on chains block verification accepts as much as the ratio rule or more, by at most 8 %",
        "the match with the session's noise accepts 3 to 10 % less than the ratio rule",
        "the match on likeliest tokens accepts less than .7 of the match with noise at temperature 1",
        "on trees the match with noise is within 5 % of drawing without replacement",
    ),
    refuted_by="a rule that needs the drafter's distribution and accepts over 10 % more than the match, "
    "which needs only ids: sending distributions would then pay",
    keys=keys,
    measure=measure,
    judge=judge,
    panels=panels,
)
