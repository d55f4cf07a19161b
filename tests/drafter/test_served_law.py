"""Criteria that need q keep the law as they are served: proved by enumeration, with exact fractions.

The drafter's own tree draws a window, the wire carries it, the verifier's pool takes, ranks and cuts it, and
production's criterion judges it. Weights are in parts of 65536, which float64 holds exactly. Over every
draw and every decision the joint law must equal plain decoding's, difference zero. Then mistakes are planted
along that way, and the enumeration notices each.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from random import Random
from typing import Any

import numpy as np
import pytest

from drafter_service.draft_tree import DraftNode
from drafter_service.drawn_tree import DrawnTree
from outrider.v1 import draft_source_pb2
from outrider.wire.codec import fragment_from_wire, fragment_to_wire
from speculative.acceptance.block import BlockVerification
from speculative.acceptance.drawn import DraftLaw, Draw, Drawn
from speculative.acceptance.k_seq import KSeq
from speculative.acceptance.lenience import Lenience
from speculative.acceptance.multi_step import MultiStep
from speculative.acceptance.ratio import Ratio
from speculative.acceptance.without_replacement import WithoutReplacement
from speculative.draft_law import UNIT, QuantisedLaw
from speculative.draft_pool import DraftPool
from speculative.drawn_window import DrawnWindow
from speculative.fragment import Fragment
from speculative.hashing import prefix_hash
from speculative.window_shape import WindowShape
from speculative.windows import WindowPool
from tests.speculative.drawing import EnumeratedChance, ToyRows, distance
from tests.speculative.enumeration import (
    PROMPT,
    Ids,
    Joint,
    Law,
    Rules,
    Sample,
    outcomes,
    plain,
    random_law,
)

WIDTH = 3
RULES = Rules(limit=len(PROMPT) + 3)
CHAIN, TREE = WindowShape(1, 2), WindowShape(2, 2)
DISTINCT = WindowShape(2, 2, distinct=True)
CASES: list[tuple[str, Any, WindowShape]] = [
    ("ratio", Ratio(), CHAIN),
    ("block", BlockVerification(), CHAIN),
    ("multi_step", MultiStep(), TREE),
    ("k_seq", KSeq(), TREE),
    ("without_replacement", WithoutReplacement(), DISTINCT),
]
by_criterion = pytest.mark.parametrize(
    ("criterion", "shape"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
QLaw = Callable[[Ids], QuantisedLaw]


def quantised(seed: int) -> QLaw:
    """A random law in parts of 65536 for every context; zeros occur."""

    @cache
    def law(ids: Ids) -> QuantisedLaw:
        random = Random(f"q {seed} {ids}")
        ids_drawn = sorted(random.sample(range(WIDTH), random.randint(1, WIDTH)))
        cuts = sorted(random.sample(range(1, UNIT), len(ids_drawn) - 1))
        weights = [high - low for low, high in zip([0, *cuts], [*cuts, UNIT], strict=True)]
        return QuantisedLaw(np.array(ids_drawn), np.array(weights))

    return law


class EnumeratedTree(DrawnTree):
    """The drafter's tree with random numbers that the enumeration chooses."""

    def __init__(self, sample: Sample, ids: Ids, shape: WindowShape) -> None:
        self._sample = sample
        end = len(ids) + shape.depth + 4
        super().__init__(ids[-1], len(ids), prefix_hash(ids), shape=shape, seed=0, end=end)

    def draw(self, node: DraftNode, law: QuantisedLaw) -> None:
        self._left = [int(weight) for weight in law.weights]
        super().draw(node, law)

    def _word(self) -> int:
        total = sum(self._left)
        place = self._sample(tuple(Fraction(weight, total) for weight in self._left))
        word = -(-(sum(self._left[:place]) << 64) // total)
        if self._shape.distinct:
            self._left[place] = 0
        return word


def window_of(sample: Sample, ids: Ids, q: QLaw, shape: WindowShape) -> DrawnWindow:
    tree = EnumeratedTree(sample, ids, shape)
    window = grown(tree, ids, q)
    assert tree.take_window(1) is None, "a window is sent once"
    return window


def grown(tree: EnumeratedTree, ids: Ids, q: QLaw) -> DrawnWindow:
    tree.draw(tree.root, q(ids))
    while level := tree.frontier(1):
        for node in level:
            tree.draw(node, q(ids + path_of(node)))
    window = tree.take_window(1)
    assert window is not None
    return window


def path_of(node: DraftNode) -> Ids:
    return () if node.parent is None else (*path_of(node.parent), node.token)


def over_the_wire(fragment: Fragment) -> Fragment:
    data = fragment_to_wire(fragment, 3).SerializeToString()
    return fragment_from_wire(draft_source_pb2.Draft.FromString(data), 1)


def exact(drawn: Drawn) -> Drawn:
    """The same with fractions: each float64 of the wire's weights is one exactly."""

    def fraction(law: DraftLaw) -> DraftLaw:
        weights = [Fraction(weight) for weight in law.weights.tolist()]
        return DraftLaw(law.ids, np.array(weights, dtype=object))

    return {node: tuple(Draw(child, fraction(law)) for child, law in draws) for node, draws in drawn.items()}


def new_pool(shape: WindowShape) -> WindowPool:
    limit = len(PROMPT) + 20
    points = DraftPool(PROMPT, epoch=1, vocabulary_size=WIDTH, limit=limit)
    return WindowPool(points, vocabulary_size=WIDTH, limit=limit, distinct=shape.distinct)


def judged(
    pool: WindowPool, criterion: Any, p: Law, ids: Ids, sample: Sample, count: int = 99, exactly: Any = exact
) -> Ids:
    """Tokens of one round of a pool, as a session has it judged."""
    ranking = pool.rank(99)
    tree, drawn = ranking.tree(count), {}
    if hasattr(ranking, "cut"):
        drawn = exactly(ranking.cut(count).drawn)
        pool.judges(ranking.cut(count).depth)
    match = criterion(tree, ToyRows(lambda path: p(ids + path), sample), drawn, EnumeratedChance(sample))
    pool.commit(match.tokens)
    return tuple(match.tokens)


def law_of(p: Law, round_: Callable[[Sample], Ids]) -> Joint:
    """The joint law of what `round_` commits, completed by plain decoding."""
    complete = plain(p, RULES)
    joint: Joint = defaultdict(Fraction)
    for ids, weight in outcomes(round_):
        for whole, share in complete(ids[: RULES.limit]).items():
            joint[whole] += weight * share
    return {ids: weight for ids, weight in joint.items() if weight}


@dataclass
class Served:
    """One round as it is served, with what a test changes on the way."""

    criterion: Any
    shape: WindowShape
    seed: int = 0
    count: int = 99
    points: tuple[tuple[Ids, tuple[int, ...]], ...] = ()
    look: Callable[[DrawnWindow], bool] = lambda window: True

    def once(self, sample: Sample) -> Ids:
        pool, p, q = new_pool(self.shape), random_law(self.seed), quantised(self.seed)
        window = window_of(sample, PROMPT, q, self.shape)
        if self.look(window):
            pool.offer(over_the_wire(window))
        for token, parents in self.points:
            pool.offer(Fragment(2, 1, len(PROMPT), prefix_hash(PROMPT), token, parents, (0.9,) * len(token)))
        return PROMPT + judged(pool, self.criterion, p, PROMPT, sample, self.count)

    def moved(self) -> Fraction:
        """Total variation between the round's joint law and plain decoding's."""
        p = random_law(self.seed)
        return distance(law_of(p, self.once), plain(p, RULES)(PROMPT))


POINTS = (((1, 0), (-1, 0)), ((2,), (-1,)))


@by_criterion
def test_a_served_round_keeps_the_targets_law(criterion: Any, shape: WindowShape) -> None:
    for seed in range(2):
        assert Served(criterion, shape, seed).moved() == 0


@by_criterion
def test_levels_that_load_cuts_and_point_masses_behind_keep_it(criterion: Any, shape: WindowShape) -> None:
    assert Served(criterion, shape, 1, count=shape.draws).moved() == 0
    assert Served(criterion, shape, 1, points=POINTS).moved() == 0
    assert Served(criterion, shape, 1, count=0).moved() == 0


@by_criterion
def test_a_window_that_comes_a_round_late_is_walked_forward(criterion: Any, shape: WindowShape) -> None:
    """The first round had no draft; what is left of the window below its token serves the second."""
    p, q = random_law(2), quantised(2)

    def rounds(sample: Sample) -> Ids:
        pool = new_pool(shape)
        window = window_of(sample, PROMPT, q, shape)
        first = judged(pool, criterion, p, PROMPT, sample)
        pool.offer(over_the_wire(window))
        return PROMPT + first + judged(pool, criterion, p, PROMPT + first, sample)

    assert distance(law_of(p, rounds), plain(p, RULES)(PROMPT)) == 0


def quarters(seed: int) -> QLaw:
    """Random laws in quarters, so that two bits choose an id of any of them."""

    @cache
    def law(ids: Ids) -> QuantisedLaw:
        random = Random(f"quarters {seed} {ids}")
        parts = [random.randrange(WIDTH) for _ in range(4)]
        drawn = sorted(set(parts))
        return QuantisedLaw(np.array(drawn), np.array([parts.count(id_) * UNIT // 4 for id_ in drawn]))

    return law


class ReplayedTree(EnumeratedTree):
    """Draws by the numbers of an earlier window, as a drafter with other weights would for the same base."""

    words: list[int]

    def _word(self) -> int:
        return self.words.pop(0)


class TwoBitTree(EnumeratedTree):
    """Draws by two random bits, and keeps them."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.words: list[int] = []

    def _word(self) -> int:
        self.words.append(self._sample((Fraction(1, 4),) * 4) << 62)
        return self.words[-1]


def second_window(criterion: Any, *, taken: bool) -> Fraction:
    """Two rounds: after a window was used, another of the same base and the same numbers comes."""
    p = random_law(2)

    def rounds(sample: Sample) -> Ids:
        pool = new_pool(CHAIN)
        first, again = TwoBitTree(sample, PROMPT, CHAIN), ReplayedTree(sample, PROMPT, CHAIN)
        pool.offer(over_the_wire(grown(first, PROMPT, quarters(1))))
        again.words = list(first.words)
        other = over_the_wire(grown(again, PROMPT, quarters(2)))
        tokens = judged(pool, criterion, p, PROMPT, sample)
        if taken:
            pool._base = -1
        offer = pool.offer(other)
        assert taken or offer.duplicate == len(other)
        return PROMPT + tokens + judged(pool, criterion, p, PROMPT + tokens, sample)

    return distance(law_of(p, rounds), plain(p, RULES)(PROMPT))


def test_of_one_base_a_second_window_is_not_taken() -> None:
    """A drafter that was restarted with other weights repeats random numbers that a round has seen."""
    assert second_window(BlockVerification(), taken=False) == 0
    assert second_window(BlockVerification(), taken=True) > 0


@by_criterion
def test_drawing_before_rounding_is_noticed(criterion: Any, shape: WindowShape) -> None:
    """A law that differs by one part in 65536 from the one that is sent moves the law of the output."""

    def unrounded(q: QLaw) -> QLaw:
        def law(ids: Ids) -> QuantisedLaw:
            sent = q(ids)
            weights = sent.weights.copy()
            if len(weights) > 1:
                weights[0], weights[1] = weights[0] + 1, weights[1] - 1
            return QuantisedLaw(sent.ids, weights)

        return law

    def once(sample: Sample) -> Ids:
        pool, p = new_pool(shape), random_law(4)
        drawn = window_of(sample, PROMPT, unrounded(quantised(4)), shape)
        laws = window_laws(drawn, quantised(4))
        pool.offer(over_the_wire(laws))
        return PROMPT + judged(pool, criterion, p, PROMPT, sample)

    p = random_law(4)
    assert distance(law_of(p, once), plain(p, RULES)(PROMPT)) > 0


def window_laws(window: DrawnWindow, q: QLaw) -> DrawnWindow:
    """The window with other laws than those that it was drawn from."""

    def path(node: int) -> Ids:
        return () if node < 0 else (*path(window.parents[node]), window.tokens[node])

    laws = tuple(q(PROMPT + path(node)) for node in window.inner)
    return DrawnWindow(*(getattr(window, name) for name in Fragment.__slots__), laws)


@by_criterion
def test_a_window_used_only_where_its_draws_please_is_noticed(criterion: Any, shape: WindowShape) -> None:
    """So is one that comes in time only then: why a source neither stops early nor sends early."""
    pleasing = Served(criterion, shape, 5, look=lambda window: window.tokens[0] == 0)
    assert pleasing.moved() > 0
    blind = Served(criterion, shape, 5, look=lambda window: len(window.laws[0].ids) > 1)
    assert blind.moved() == 0


def test_a_repeated_draw_that_is_dropped_is_noticed() -> None:
    def dropped(drawn: Drawn) -> Drawn:
        return {
            node: tuple({draw.node: draw for draw in draws}.values()) for node, draws in exact(drawn).items()
        }

    def moved(exactly: Any) -> Fraction:
        p, q = random_law(6), quantised(6)

        def once(sample: Sample) -> Ids:
            pool = new_pool(TREE)
            pool.offer(over_the_wire(window_of(sample, PROMPT, q, TREE)))
            return PROMPT + judged(pool, MultiStep(), p, PROMPT, sample, exactly=exactly)

        return distance(law_of(p, once), plain(p, RULES)(PROMPT))

    assert moved(exact) == 0
    assert moved(dropped) > 0


def test_lenience_makes_no_token_more_than_its_bound_likelier() -> None:
    """A round of lenience is within p / l for every first token; with l = 1 it keeps the law."""
    half = Fraction(1, 2)
    for seed in range(4):
        p = random_law(seed)
        first: dict[int, Fraction] = defaultdict(Fraction)
        for ids, weight in outcomes(Served(Lenience(half), CHAIN, seed).once):  # type: ignore[arg-type]
            first[ids[len(PROMPT)]] += weight
        assert all(first[token] <= weight / half for token, weight in enumerate(p(PROMPT)))
    assert Served(Lenience(1), CHAIN).moved() == 0
