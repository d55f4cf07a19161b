"""Relaxed criteria keep their bounds: the strict ends are exact, and what does not pass never gains."""

from collections import defaultdict
from dataclasses import dataclass
from fractions import Fraction
from math import exp, log
from random import Random
from typing import Any

import numpy as np
import pytest

from speculative.acceptance import CRITERIA
from speculative.acceptance import criterion as criterion_module
from speculative.acceptance.bild import BiLD
from speculative.acceptance.blockwise import Blockwise
from speculative.acceptance.criterion import Criterion, KeyedChance, Promise
from speculative.acceptance.lenience import Lenience
from speculative.acceptance.path_match import path_match
from speculative.acceptance.specdec import SpecDec
from speculative.acceptance.typical import Typical
from speculative.errors import InvalidRequest
from speculative.implementations import load_implementation
from speculative.noise import accept_uniform
from speculative.tree import ROOT, TokenTree
from tests.speculative.enumeration import PROMPT, Ids, Law, Sample, Weights, outcomes, random_law

CHANCE = KeyedChance(1, 2)
STRICT: list[Criterion] = [
    SpecDec(beta=1, gap=5.0),
    Blockwise(),
    BiLD(rollback=0.0),
    BiLD(rollback=100.0, dissent=0),
    BiLD(rollback=100.0, fallback=1.0),
]
LOOSE: list[Criterion] = [
    Typical(),
    Typical(epsilon=0.5, delta=1.0),
    SpecDec(beta=2, gap=3.0),
    Blockwise(top_k=2),
    Blockwise(distance=1),
    BiLD(rollback=1.0),
    BiLD(rollback=1.0, dissent=1),
]


@dataclass
class GreedyRows:
    """The toy target, decoded greedily."""

    law: Law

    def __call__(self, node: int, path: Ids) -> int:
        weights = self.law(PROMPT + path)
        return weights.index(max(weights))

    def probabilities(self, node: int, path: Ids) -> Any:
        raise AssertionError("no relaxed criterion without q asks for it")

    def log_probabilities(self, node: int, path: Ids) -> Any:
        with np.errstate(divide="ignore"):
            return np.log(np.array([float(weight) for weight in self.law(PROMPT + path)]))


@dataclass
class SampledRows(GreedyRows):
    """The toy target, sampled; a place is sampled once, however often a criterion asks."""

    sample: Sample

    def __post_init__(self) -> None:
        self.known: dict[Ids, int] = {}

    def __call__(self, node: int, path: Ids) -> int:
        if path not in self.known:
            self.known[path] = self.sample(self.law(PROMPT + path))
        return self.known[path]


def random_tree(random: Random, nodes: int = 5) -> TokenTree:
    tokens: list[int] = []
    parents: list[int] = []
    survival: list[float] = []
    while len(tokens) < nodes:
        parent, token = random.randrange(-1, len(tokens)), random.randrange(3)
        if (parent, token) not in zip(parents, tokens, strict=True):
            parents.append(parent)
            tokens.append(token)
            survival.append(0.6 * (survival[parent] if parent >= 0 else 1.0))
    return TokenTree(tuple(tokens), tuple(parents), tuple(survival), (1,) * nodes)


@pytest.mark.parametrize("criterion", STRICT, ids=str)
def test_at_its_strict_end_a_criterion_gives_the_greedy_ids(criterion: Criterion) -> None:
    for seed in range(60):
        rows, tree = GreedyRows(random_law(seed)), random_tree(Random(seed))
        found = criterion(tree, rows, {}, CHANCE)
        assert found.tokens == path_match(tree, rows).tokens, seed


@pytest.mark.parametrize("criterion", [*STRICT, *LOOSE], ids=str)
def test_no_fewer_tokens_are_accepted_than_by_the_path_match(criterion: Criterion) -> None:
    gained = 0
    for seed in range(60):
        tree = random_tree(Random(seed))
        samples = Random(seed)
        rows = SampledRows(
            random_law(seed), lambda weights, samples=samples: samples.choices(range(3), weights)[0]
        )
        matched = path_match(tree, rows)
        found = criterion(tree, rows, {}, CHANCE)
        assert len(found.tokens) >= len(matched.tokens), seed
        assert tuple(tree.tokens[node] for node in found.path) == found.tokens[:-1]
        gained += len(found.tokens) - len(matched.tokens)
    assert gained > 0 or criterion in STRICT


def token_passes(criterion: Criterion, weights: Weights, token: int) -> bool:
    """The published thresholds, written down once more."""
    logs = [log(weight) if weight else -np.inf for weight in weights]
    best = max(range(3), key=lambda other: logs[other])
    before = sum(other > logs[token] for other in logs) + logs[:token].count(logs[token])
    match criterion:
        case Typical():
            entropy = -sum(float(weight) * log(weight) for weight in weights if weight)
            return exp(logs[token]) >= min(criterion.epsilon, criterion.delta * exp(-entropy))
        case SpecDec():
            return before < criterion.beta and logs[best] - logs[token] <= criterion.gap
        case Blockwise():
            return before < criterion.top_k or abs(token - best) <= criterion.distance
        case BiLD():
            return -logs[token] <= criterion.rollback
    raise AssertionError(criterion)


@pytest.mark.parametrize("criterion", LOOSE, ids=str)
def test_a_token_that_does_not_pass_is_never_likelier_than_under_the_target(criterion: Criterion) -> None:
    law, moved = random_law(5), 0
    weights = law(PROMPT)
    for token in range(3):
        tree = TokenTree((token,), (ROOT,), (0.5,), (1,))
        joint: dict[int, Fraction] = defaultdict(Fraction)
        for first, weight in outcomes(
            lambda sample, tree=tree: criterion(tree, SampledRows(law, sample), {}, CHANCE).tokens[0]
        ):
            joint[first] += weight
        if token_passes(criterion, weights, token):
            assert joint == {token: 1}
            moved += 1
        else:
            assert all(joint[other] == weights[other] for other in range(3))
    assert moved


def accepts(criterion: Criterion, *parts: int) -> bool:
    """Whether token 0 passes, which has the first of these parts of the target's distribution."""
    rows = GreedyRows(lambda ids: tuple(Fraction(part, sum(parts)) for part in parts))
    return len(criterion(TokenTree((0,), (ROOT,), (0.5,), (1,)), rows, {}, CHANCE).path) == 1


def test_typical_thresholds_follow_the_entropy() -> None:
    """Where the target is sure, epsilon decides; where it is not, delta exp(-H)."""
    criterion = Typical(epsilon=0.3, delta=0.9)
    assert not accepts(criterion, 20, 78, 2)  # 0.2 < min(0.3, 0.9 exp(-0.59))
    assert accepts(criterion, 35, 60, 5)  # 0.35 >= min(0.3, 0.9 exp(-0.82) = 0.40)
    assert accepts(criterion, 32, 34, 34)  # 0.32 >= 0.9 exp(-1.10) = 0.30
    assert not accepts(criterion, 28, 36, 36)  # 0.28 < 0.9 exp(-1.09) = 0.30
    assert accepts(Typical(epsilon=0.3, delta=0.6), 28, 36, 36)  # 0.28 >= 0.6 exp(-1.09) = 0.20


def test_specdec_tolerates_a_gap_and_a_rank() -> None:
    assert accepts(SpecDec(beta=2, gap=1.0), 30, 60, 10)  # log 2 behind, second
    assert not accepts(SpecDec(beta=2, gap=0.6), 30, 60, 10)
    assert not accepts(SpecDec(beta=2, gap=1.0), 30, 35, 35)


def test_the_least_block_takes_any_drafts_that_are_possible() -> None:
    tree = TokenTree((0, 1, 2), (-1, 0, 1), (0.5,) * 3, (1,) * 3)

    def law(ids: Ids) -> Weights:
        return Fraction(1, 100), Fraction(1, 100), Fraction(98, 100)

    for least in (2, 3, 4):
        assert len(Blockwise(least_block=least)(tree, GreedyRows(law), {}, CHANCE).tokens) >= least


@pytest.mark.parametrize("criterion", [Blockwise(least_block=64), Blockwise(top_k=3), Typical(delta=5e-324)])
def test_a_token_that_cuts_leave_no_chance_is_never_accepted(criterion: Criterion) -> None:
    tree = TokenTree((0, 1), (-1, 0), (0.5,) * 2, (1,) * 2)
    rows = GreedyRows(lambda ids: (Fraction(0), Fraction(0), Fraction(1)))
    assert criterion(tree, rows, {}, CHANCE).tokens == (2,)


def test_an_unsure_drafter_hands_over() -> None:
    rows = GreedyRows(lambda ids: (Fraction(4, 10), Fraction(3, 10), Fraction(3, 10)))
    tree = TokenTree((1, 2), (-1, 0), (0.9, 0.36), (1, 1))
    assert BiLD(rollback=5.0)(tree, rows, {}, CHANCE).path == (0, 1)
    assert BiLD(rollback=5.0, fallback=0.6)(tree, rows, {}, CHANCE).path == (0,)


def test_the_drafter_is_as_sure_of_a_token_as_its_survival_falls_from_the_parents() -> None:
    rows = GreedyRows(lambda ids: (Fraction(4, 10), Fraction(3, 10), Fraction(3, 10)))
    tree = TokenTree((1, 2), (-1, 0), (0.6, 0.36), (1, 1))
    assert BiLD(rollback=5.0, fallback=0.5)(tree, rows, {}, CHANCE).path == (0, 1)


def test_of_equally_deep_paths_the_likeliest_is_taken() -> None:
    rows = GreedyRows(lambda ids: (Fraction(2, 10), Fraction(5, 10), Fraction(3, 10)))
    tree = TokenTree((0, 2, 1), (-1, -1, -1), (0.5,) * 3, (1,) * 3)
    assert Blockwise(top_k=3)(tree, rows, {}, CHANCE).path == (2,)


def test_what_was_rolled_back_does_not_make_a_path_likelier() -> None:
    """Both paths are cut to two tokens; behind the less likely two hung the likelier ones."""

    def law(ids: Ids) -> Weights:
        match ids[len(PROMPT) :]:
            case ():
                parts = (50, 30, 20)
            case (_,):
                parts = (90, 5, 5)
            case (1, *_):
                parts = (96, 2, 2)
            case _:
                parts = (50, 40, 10)
        return tuple(Fraction(part, 100) for part in parts)

    tree = TokenTree((1, 0, 1, 1, 2, 0, 1, 1), (-1, 0, 1, 2, -1, 4, 5, 6), (0.5,) * 8, (1,) * 8)
    assert BiLD(rollback=5.0, dissent=1)(tree, GreedyRows(law), {}, CHANCE).path == (0, 1)


def test_a_run_of_dissent_is_rolled_back_from_its_beginning() -> None:
    rows = GreedyRows(lambda ids: (Fraction(4, 10), Fraction(3, 10), Fraction(3, 10)))
    tree = TokenTree((0, 1, 2, 0), (-1, 0, 1, 2), (0.5,) * 4, (1,) * 4)
    assert BiLD(rollback=5.0, dissent=2)(tree, rows, {}, CHANCE).tokens == (0, 1, 2, 0, 0)
    assert BiLD(rollback=5.0, dissent=1)(tree, rows, {}, CHANCE).tokens == (0, 0)


@pytest.mark.parametrize("name", sorted(CRITERIA))
def test_every_criterion_is_found_by_its_name_and_says_what_it_promises(name: str) -> None:
    criterion = load_implementation(CRITERIA, name)()
    assert criterion.promise in (Promise.SAME_LAW, Promise.RELAXED)
    assert criterion.needs_q == (criterion.promise is Promise.SAME_LAW or name == "lenience")


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: Lenience(0.0), r"criterion.lenience.factor is 0; above 0 to 1 is possible"),
        (lambda: Lenience(1.5), r"criterion.lenience.factor is 1.5"),
        (lambda: Typical(epsilon=2.0), r"criterion.typical.epsilon is 2; above 0 to 1"),
        (lambda: Typical(delta=float("nan")), r"criterion.typical.delta is nan"),
        (lambda: SpecDec(beta=0), r"criterion.specdec.beta is 0; 1 to 1024"),
        (lambda: SpecDec(gap=-1.0), r"criterion.specdec.gap is -1"),
        (lambda: Blockwise(top_k=0), r"criterion.blockwise.top_k is 0"),
        (lambda: Blockwise(distance=-1), r"criterion.blockwise.distance is -1"),
        (lambda: Blockwise(least_block=65), r"criterion.blockwise.least_block is 65"),
        (lambda: BiLD(fallback=1.1), r"criterion.bild.fallback is 1.1"),
        (lambda: BiLD(rollback=float("inf")), r"criterion.bild.rollback is inf"),
        (lambda: BiLD(dissent=-1), r"criterion.bild.dissent is -1"),
    ],
)
def test_a_parameter_out_of_range_is_refused_by_name(made: Any, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        made()


def test_decisions_of_a_round_are_uniform_and_never_come_again() -> None:
    drawn = [accept_uniform(7, base, index) for base in range(40) for index in range(50)]
    assert len(set(drawn)) == len(drawn)
    assert 0 < min(drawn) < max(drawn) < 1
    counts = np.bincount((np.array(drawn) * 20).astype(int), minlength=20)
    assert ((counts - 100) ** 2 / 100).sum() < 45.3  # chi-square, 19 degrees of freedom, one in 600
    chance, again = KeyedChance(7, 3), KeyedChance(7, 3)
    weights = np.array([0.0, 0.5, 0.0, 0.5, 0.0])
    chosen = [chance.choose(weights) for _ in range(100)]
    assert chosen == [again.choose(weights) for _ in range(100)]
    assert set(chosen) == {1, 3}
    later = KeyedChance(7, 4)
    assert chosen != [later.choose(weights) for _ in range(100)]
    passed = [chance.below(0.3) for _ in range(2000)]
    assert abs(sum(passed) - 600) < 80  # four standard deviations
    assert not any(chance.below(0) for _ in range(100))
    assert all(chance.below(1) for _ in range(100))


@pytest.mark.parametrize(("uniform", "weights"), [(1 - 2.0**-53, (5e-324, 0.0)), (2.0**-53, (0.0, 5e-324))])
def test_an_id_without_weight_is_never_chosen(
    monkeypatch: pytest.MonkeyPatch, uniform: float, weights: tuple[float, ...]
) -> None:
    """The product of a number and a least sum rounds to the sum, or to 0."""
    monkeypatch.setattr(criterion_module, "accept_uniform", lambda seed, base, index: uniform)
    assert weights[KeyedChance(7, 3).choose(np.array(weights))] > 0
