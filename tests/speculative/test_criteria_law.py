"""Criteria that promise the same law keep it: proved by enumeration, with exact fractions.

A toy drafter draws a window from distributions of its own; the production criterion judges the window; plain
decoding completes what the round commits. Over every draw and every decision the joint law must equal plain
decoding's, difference zero.
"""

from fractions import Fraction
from itertools import product

import numpy as np
import pytest

from speculative.acceptance.block import BlockVerification
from speculative.acceptance.criterion import Criterion, Promise
from speculative.acceptance.k_seq import KSeq, divide
from speculative.acceptance.lenience import Lenience
from speculative.acceptance.multi_step import MultiStep
from speculative.acceptance.ratio import Ratio
from speculative.acceptance.without_replacement import WithoutReplacement
from speculative.tree import ROOT
from tests.speculative.drawing import (
    POINTS,
    SHORT,
    Draft,
    EnumeratedChance,
    ToyRows,
    Window,
    chain,
    chains,
    distinct,
    draft_law,
    independent,
    law_after_a_round,
    with_points,
)
from tests.speculative.enumeration import (
    PROMPT,
    Ids,
    Law,
    Rules,
    Sample,
    Weights,
    outcomes,
    plain,
    random_law,
)

CASES: list[tuple[str, Criterion, Draft]] = [
    ("ratio, chain of 1", Ratio(), chain(1)),
    ("ratio, chain of 3", Ratio(), chain(3)),
    ("ratio, first of two distinct draws", Ratio(), distinct((2,))),
    ("ratio, points behind", Ratio(), with_points(chain(2), POINTS)),
    ("ratio, no draws", Ratio(), with_points(chain(0), POINTS)),
    ("multi-step, three draws", MultiStep(), independent((3,))),
    ("multi-step, tree", MultiStep(), independent((2, 2))),
    ("multi-step, two chains", MultiStep(), chains(2, 2)),
    ("multi-step, points behind", MultiStep(), with_points(independent((2, 1)), POINTS)),
    ("without replacement, two", WithoutReplacement(), distinct((2,))),
    ("without replacement, support runs out", WithoutReplacement(), distinct((4,))),
    ("without replacement, tree", WithoutReplacement(), distinct((2, 2))),
    ("without replacement, points behind", WithoutReplacement(), with_points(distinct((2, 1)), POINTS)),
    ("k-SEQ, two draws", KSeq(), independent((2,))),
    ("k-SEQ, four draws", KSeq(), independent((4,))),
    ("k-SEQ, two chains", KSeq(), chains(2, 2)),
    ("k-SEQ, points behind", KSeq(), with_points(independent((2, 1)), POINTS)),
    ("block, chain of 1", BlockVerification(), chain(1)),
    ("block, chain of 2", BlockVerification(), chain(2)),
    ("block, chain of 3", BlockVerification(), chain(3)),
    ("block, first of two distinct draws", BlockVerification(), distinct((2, 2))),
    ("block, points behind", BlockVerification(), with_points(chain(2), POINTS)),
]


@pytest.mark.parametrize(
    ("criterion", "draft"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_a_round_keeps_the_targets_law(criterion: Criterion, draft: Draft) -> None:
    assert criterion.promise is Promise.SAME_LAW
    for seed in range(3):
        p, q = random_law(seed), random_law(100 + seed)
        expected = plain(p, SHORT)(PROMPT)
        assert law_after_a_round(criterion, p, q, draft) == expected


@pytest.mark.parametrize(
    "criterion", [Ratio(), MultiStep(), WithoutReplacement(), KSeq(), BlockVerification()], ids=str
)
@pytest.mark.parametrize(
    "rules",
    [
        Rules(limit=len(PROMPT) + 3, eos=frozenset({1})),
        Rules(limit=len(PROMPT) + 3, stops=(b"ab",)),
        Rules(limit=len(PROMPT) + 1),
        Rules(limit=len(PROMPT) + 3, eos=frozenset({1}), min_tokens=2),
    ],
    ids=["end of sequence", "stop string", "limit", "least length"],
)
def test_a_round_that_runs_past_the_end_keeps_the_law(criterion: Criterion, rules: Rules) -> None:
    p, q = rules.applied(random_law(11)), random_law(12)
    assert law_after_a_round(criterion, p, q, chain(2), rules) == plain(p, rules)(PROMPT)


@pytest.mark.parametrize("criterion", [Ratio(), MultiStep(), KSeq(), BlockVerification()], ids=str)
def test_a_drafter_equal_to_the_target_is_always_accepted(criterion: Criterion) -> None:
    p = random_law(21)

    def round_(sample: Sample) -> int:
        window = chain(2)(p, sample)
        rows = ToyRows(lambda path: p(PROMPT + path), sample)
        return len(criterion(window.tree, rows, window.draws, EnumeratedChance(sample)).path)

    assert {accepted for accepted, _ in outcomes(round_)} == {2}


def accepted(criterion: Criterion, p: Law, q: Law, draft: Draft) -> Fraction:
    """Expected number of accepted nodes of a round."""

    def round_(sample: Sample) -> int:
        window = draft(q, sample)
        rows = ToyRows(lambda path: p(PROMPT + path), sample)
        return len(criterion(window.tree, rows, window.draws, EnumeratedChance(sample)).path)

    return sum((count * weight for count, weight in outcomes(round_)), Fraction(0))


def test_block_verification_accepts_what_its_paper_says() -> None:
    def p(ids: Ids) -> Weights:
        return Fraction(1, 3), Fraction(2, 3), Fraction(0)

    def q(ids: Ids) -> Weights:
        return Fraction(2, 3), Fraction(1, 3), Fraction(0)

    assert accepted(Ratio(), p, q, chain(2)) == Fraction(10, 9)
    assert accepted(BlockVerification(), p, q, chain(2)) == Fraction(11, 9)


def test_each_rule_accepts_as_much_as_theory_says() -> None:
    for seed in range(6):
        p, q = random_law(seed), random_law(50 + seed)
        pair = list(zip(p(PROMPT), q(PROMPT), strict=True))
        assert accepted(Ratio(), p, q, chain(1)) == sum(min(a, b) for a, b in pair)
        assert accepted(BlockVerification(), p, q, chain(3)) >= accepted(Ratio(), p, q, chain(3))
        for draws in (2, 3):
            replaced = accepted(MultiStep(), p, q, independent((draws,)))
            assert accepted(WithoutReplacement(), p, q, distinct((draws,))) >= replaced
            most = sum(min(a, 1 - (1 - b) ** draws) for a, b in pair)
            assert float(most) * (1 - 1 / np.e) <= accepted(KSeq(), p, q, independent((draws,))) <= most


def test_a_mixture_of_drafters_keeps_the_law() -> None:
    """Each draw of a node may come from a distribution of its own, in an order fixed beforehand."""
    for seed, kinds in product(range(3), [(1, 2), (2, 1, 2), (2, 2, 1)]):
        p = random_law(seed)

        def draft(_: Law, sample: Sample, kinds: Ids = kinds, seed: int = seed) -> Window:
            window = Window()
            for kind in kinds:
                weights = random_law(60 + 10 * kind + seed)(PROMPT)
                window.draw(ROOT, sample(weights), draft_law(weights))
            return window

        assert law_after_a_round(MultiStep(), p, p, draft) == plain(p, SHORT)(PROMPT)


@pytest.mark.parametrize(
    "criterion", [Ratio(), MultiStep(), WithoutReplacement(), KSeq(), BlockVerification()], ids=str
)
def test_points_are_accepted_as_often_as_by_the_path_match(criterion: Criterion) -> None:
    for seed in range(3):
        p = random_law(seed)
        once = p(PROMPT)[1]
        twice = once * p((*PROMPT, 1))[0]
        assert accepted(criterion, p, p, with_points(chain(0), (((), 1), ((1,), 0)))) == once + twice


def test_k_seq_divides_by_no_more_than_it_must() -> None:
    """The inequality that keeps the law holds exactly, and the least factor makes it an equality."""
    for seed, draws in product(range(40), (2, 3, 4)):
        p, q = random_law(seed, 4)(PROMPT), random_law(300 + seed, 4)(PROMPT)
        law = draft_law(q)
        rho = divide(np.array(p, dtype=object), law, draws).rho
        beta = sum(min(b, a / rho) for a, b in zip(p, q, strict=True))
        mass = 1 - (1 - beta) ** draws
        assert mass <= rho * beta
        assert rho == 1 or mass == pytest.approx(rho * beta, abs=1e-9)


@pytest.mark.parametrize("factor", [Fraction(1), Fraction(7, 10), Fraction(3, 10)])
def test_lenience_has_the_law_of_its_formula_and_keeps_its_bound(factor: Fraction) -> None:
    """A draft passes with min(1, p / (l q)), else norm([p - l q]+) is left."""
    worst = Fraction(0)
    for seed in range(6):
        p, q = random_law(seed), random_law(100 + seed)
        joint = law_after_a_round(Lenience(factor), p, q, chain(1), Rules(limit=len(PROMPT) + 1))
        pairs = list(zip(p(PROMPT), q(PROMPT), strict=True))
        kept = [min(b, a / factor) for a, b in pairs]
        left = [max(a - factor * b, Fraction(0)) for a, b in pairs]
        for token, weight in enumerate(p(PROMPT)):
            found = joint.get((*PROMPT, token), Fraction(0))
            share = left[token] / sum(left) if sum(left) else weight
            assert found == kept[token] + (1 - sum(kept)) * share
            assert found <= weight / factor
            worst = max(worst, abs(found - weight))
    assert (worst == 0) == (factor == 1)
