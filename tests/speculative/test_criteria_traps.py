"""Every known way in which a criterion of the same law is silently wrong, planted: the enumeration notices.

Each must differ from the law that the same round has without the mistake.
"""

from collections import defaultdict
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from speculative.acceptance.block import BlockVerification
from speculative.acceptance.criterion import Chance, Criterion
from speculative.acceptance.drawn import DraftLaw, Drawn
from speculative.acceptance.k_seq import KSeq, divide
from speculative.acceptance.multi_step import MultiStep
from speculative.acceptance.path_match import Match
from speculative.acceptance.ratio import Ratio
from speculative.acceptance.rejection import residual, step_by_step
from speculative.acceptance.without_replacement import WithoutReplacement
from speculative.stop import FinishReason, StopChecker, cut_at_stop
from speculative.tree import ROOT, TokenTree
from tests.speculative.drawing import (
    POINTS,
    SHORT,
    Draft,
    EnumeratedChance,
    ToyRows,
    Window,
    chain,
    distance,
    draft_law,
    independent,
    law_after_a_round,
    with_points,
)
from tests.speculative.enumeration import (
    PROMPT,
    Ids,
    Joint,
    Law,
    Rules,
    Sample,
    Weights,
    outcomes,
    penalised,
    plain,
    random_law,
)

FAR = 0.02
"""A planted mistake has to move the joint law by more than this."""


def moved(
    criterion: Any, draft: Draft, *, width: int = 3, seeds: range = range(6), look: Any = None
) -> float:
    """The greatest total variation, over some pairs of models, between the round's law and plain
    decoding's."""
    found = []
    for seed in seeds:
        p, q = random_law(seed, width), random_law(100 + seed, width)
        seen = None if look is None else look(p)
        joint = law_after_a_round(criterion, p, q, draft, look=seen)
        found.append(float(distance(joint, plain(p, SHORT)(PROMPT))))
    return max(found)


def test_trap_1_a_sample_for_each_branch_of_one_node() -> None:
    def longest_branch(tree: TokenTree, rows: ToyRows, drawn: Drawn, chance: Chance) -> Match:
        """Judges each draw as a chain of its own and keeps the longest."""
        matches = [Ratio()(tree, rows, {**drawn, ROOT: (draw,)}, chance) for draw in drawn[ROOT]]
        return max(matches, key=lambda match: len(match.tokens))

    assert moved(MultiStep(), independent((2,))) == 0
    assert moved(longest_branch, independent((2,))) > FAR


@pytest.mark.parametrize(
    "criterion", [Ratio(), MultiStep(), WithoutReplacement(), KSeq(), BlockVerification()], ids=str
)
def test_trap_2_likeliest_children_passed_off_as_drawn(criterion: Criterion) -> None:
    def likeliest(q: Law, sample: Sample) -> Window:
        window, weights = Window(), q(PROMPT)
        for token in sorted(range(3), key=lambda token: -weights[token])[:2]:
            if weights[token]:
                window.draw(ROOT, token, draft_law(weights))
        return window

    def as_points(q: Law, sample: Sample) -> Window:
        window = likeliest(q, sample)
        window.draws = {}
        return window

    assert moved(criterion, as_points) == 0
    assert moved(criterion, likeliest) > FAR


@pytest.mark.parametrize(
    "criterion", [Ratio(), MultiStep(), WithoutReplacement(), KSeq(), BlockVerification()], ids=str
)
def test_trap_3_drawn_from_one_truncation_and_judged_by_another(criterion: Criterion) -> None:
    def cut(weights: Weights) -> Weights:
        kept = sorted(range(3), key=lambda token: -weights[token])[:2]
        left = [weight if token in kept else Fraction(0) for token, weight in enumerate(weights)]
        return tuple(weight / sum(left) for weight in left)

    def drafted(drawn_from: Callable[[Weights], Weights], sent: Callable[[Weights], Weights]) -> Draft:
        def draft(q: Law, sample: Sample) -> Window:
            weights, window = q(PROMPT), Window()
            window.draw(ROOT, sample(drawn_from(weights)), draft_law(sent(weights)))
            return window

        return draft

    assert moved(criterion, drafted(cut, cut)) == 0
    assert moved(criterion, drafted(cut, tuple)) > FAR
    assert moved(criterion, drafted(tuple, lambda weights: tuple((w + 1) / 4 for w in weights))) > FAR


@pytest.mark.parametrize(
    "criterion", [Ratio(), MultiStep(), WithoutReplacement(), KSeq(), BlockVerification()], ids=str
)
def test_trap_4_a_draw_dropped_after_a_look_at_it(criterion: Criterion) -> None:
    def pruned(before: bool) -> Draft:
        """Drops the second level where the drafter is unsure: of the first token (seen), or of the second."""

        def draft(q: Law, sample: Sample) -> Window:
            window, whole = Window(), chain(2)(q, sample)
            first = whole.draws[ROOT][0]
            window.draw(ROOT, whole.tokens[first.node], first.law)
            second = whole.draws[first.node][0]
            judged = first if before else second
            if judged.law.of(whole.tokens[judged.node]) >= Fraction(1, 3):
                window.draw(0, whole.tokens[second.node], second.law)
            return window

        return draft

    assert moved(criterion, pruned(before=True)) == 0
    assert moved(criterion, pruned(before=False)) > FAR


def test_trap_4_a_repeated_draw_dropped_by_a_merge() -> None:
    def merged(q: Law, sample: Sample) -> Window:
        window = independent((2,))(q, sample)
        first, second = window.draws[ROOT]
        window.draws[ROOT] = (first,) if first.node == second.node else (first, second)
        return window

    def behind_a_point(drop: bool, without: bool = False) -> Draft:
        """A lookup's token first, then a draw, from a q `without` that token; a merge that keeps one node for
        both drops the draw."""

        def draft(q: Law, sample: Sample) -> Window:
            window, weights = Window(), q(PROMPT)
            window.draw(ROOT, 1, draft_law((Fraction(0), Fraction(1), Fraction(0))))
            if without and weights[1] < 1:
                weights = tuple(
                    w / (1 - weights[1]) if id_ != 1 else Fraction(0) for id_, w in enumerate(weights)
                )
            token = sample(weights)
            if not drop or token != 1:
                window.draw(ROOT, token, draft_law(weights))
            return window

        return draft

    assert moved(MultiStep(), independent((2,))) == 0
    assert moved(MultiStep(), merged) > FAR
    assert moved(MultiStep(), behind_a_point(drop=False)) == 0
    assert moved(MultiStep(), behind_a_point(drop=True)) > FAR
    assert moved(MultiStep(), behind_a_point(drop=False, without=True)) == 0


def test_trap_5_a_draft_not_drawn_from_q_matched_with_the_likeliest() -> None:
    def argmax_match(tree: TokenTree, rows: ToyRows, drawn: Drawn, chance: Chance) -> Match:
        """Accepts a child without draws if it is the target's likeliest token."""

        def judge(node: int, p: Any) -> tuple[int | None, Any]:
            child = tree.children(node).get(int(p.argmax()))
            return child, p

        return step_by_step(tree, rows, chance, judge)

    points = with_points(chain(0), POINTS)
    assert moved(Ratio(), points) == 0
    assert moved(argmax_match, points) > FAR


@pytest.mark.parametrize(
    "criterion", [Ratio(), MultiStep(), WithoutReplacement(), KSeq(), BlockVerification()], ids=str
)
def test_trap_6_penalties_with_another_nodes_prefix(criterion: Criterion) -> None:
    base, q = random_law(2), random_law(102)

    def p(ids: Ids) -> Weights:
        return penalised(base(ids), ids[len(PROMPT) :])

    def the_roots_history(ids: Ids) -> Weights:
        return base(ids)

    def for_the_token_behind_the_draft_alone(ids: Ids) -> Weights:
        return p(ids) if len(ids) == len(PROMPT) + 2 else base(ids)

    expected = plain(p, SHORT)(PROMPT)
    assert law_after_a_round(criterion, p, q, chain(2)) == expected
    for look in (the_roots_history, for_the_token_behind_the_draft_alone):
        joint = law_after_a_round(criterion, p, q, chain(2), look=look)
        assert float(distance(joint, expected)) > FAR, look


@pytest.mark.parametrize(
    "criterion", [Ratio(), MultiStep(), WithoutReplacement(), KSeq(), BlockVerification()], ids=str
)
def test_trap_7_widths_that_differ_and_a_residual_of_no_mass(criterion: Criterion) -> None:
    def narrow(q: Law, sample: Sample) -> Window:
        """A drafter that knows three of the target's four ids."""
        return chain(2)(random_law(7), sample)

    def cut_to_three(p: Law) -> Law:
        def seen(ids: Ids) -> Weights:
            known = p(ids)[:3]
            return (*(weight / sum(known) for weight in known), Fraction(0)) if any(known) else p(ids)

        return seen

    assert moved(criterion, narrow, width=4, seeds=range(2)) == 0
    assert moved(criterion, narrow, width=4, seeds=range(2), look=cut_to_three) > FAR
    p = np.array([0.25, 0.75])
    rounded = DraftLaw(np.array([0, 1]), np.array([0.25, 0.75 + 1e-16]))
    assert residual(p, rounded).sum() == 1


@pytest.mark.parametrize(
    "criterion", [Ratio(), MultiStep(), WithoutReplacement(), KSeq(), BlockVerification()], ids=str
)
def test_trap_8_an_end_inside_an_accepted_run(criterion: Criterion) -> None:
    def only_behind_the_run(checker: StopChecker, tokens: Ids) -> tuple[Ids, FinishReason | None]:
        """Planted: the run is committed whole, and its last token alone can end the request."""
        room = tokens[: SHORT.limit - len(PROMPT)]
        return room, FinishReason.STOP if room[-1] == 1 or len(room) == SHORT.limit - len(PROMPT) else None

    rules = Rules(limit=SHORT.limit, eos=frozenset({1}))
    p, q = random_law(11), random_law(12)
    expected = plain(p, rules)(PROMPT)
    assert law_after_a_round(criterion, p, q, chain(2), rules) == expected
    planted = law_after_a_round(criterion, p, q, chain(2), rules, cut=only_behind_the_run)
    assert float(distance(planted, expected)) > FAR


def test_k_seq_without_its_division_leaves_less_than_nothing() -> None:
    p = np.array([Fraction(1, 2), Fraction(1, 2)], dtype=object)
    law = draft_law((Fraction(3, 4), Fraction(1, 4)))
    shared = np.minimum(law.weights, p)  # rho = 1
    beta = shared.sum()
    assert (p - shared * ((1 - (1 - beta) ** 2) / beta)).min() < 0
    division = divide(p, law, 2)
    assert 1 < division.rho <= 2
    assert division.left.min() >= 0

    def undivided(tree: TokenTree, rows: ToyRows, drawn: Drawn, chance: Chance) -> Match:
        def judge(node: int, p: Any) -> tuple[int | None, Any]:
            for child, law in drawn.get(node, ()):
                token = tree.tokens[child]
                if chance.below(p[token] / law.of(token)):
                    return child, p
            return None, divide(p, drawn[node][0].law, 2).left if node in drawn else p

        return step_by_step(tree, rows, chance, judge)

    assert moved(undivided, independent((2,))) > FAR


def test_a_number_that_an_earlier_round_looked_at_changes_the_law() -> None:
    """Block verification looks at numbers beyond what it commits: keyed by position, they would come
    again."""

    def two_rounds(shared: bool) -> Joint:
        rules, p, q = Rules(limit=len(PROMPT) + 2), random_law(3), random_law(103)

        def run(sample: Sample) -> Ids:
            ids: Ids = PROMPT
            known: dict[int, int] = {}
            stop_checker = rules.stop_checker(ids)
            for _ in range(2):
                if stop_checker.finished:
                    break
                window, node = Window(), ROOT
                for depth in range(2):
                    weights = q(ids + window.path_tokens(node))
                    place = len(ids) + depth
                    token = known.get(place, -1) if shared else -1
                    if token < 0 or not weights[token]:
                        token = known[place] = sample(weights)
                    node = window.draw(node, token, draft_law(weights))
                before = ids
                rows = ToyRows(lambda path, before=before: p(before + path), sample)
                match = BlockVerification()(window.tree, rows, window.draws, EnumeratedChance(sample))
                committed, _ = cut_at_stop(stop_checker, match.tokens)
                ids += committed
            return ids if stop_checker.finished else (*ids, *(-1,))

        joint: Joint = defaultdict(Fraction)
        for ids, weight in outcomes(run):
            joint[ids] += weight
        return {ids: weight for ids, weight in joint.items() if weight}

    expected = plain(random_law(3), Rules(limit=len(PROMPT) + 2))(PROMPT)
    assert two_rounds(shared=False) == expected
    assert float(distance(two_rounds(shared=True), expected)) > 0.001
