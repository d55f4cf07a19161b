"""The pool of a session whose criterion needs q: which windows it takes, and how rounds cut them."""

from typing import Any

import numpy as np
import pytest

from outrider.wire.criteria import SERVED_CRITERIA
from speculative.acceptance import CRITERIA
from speculative.draft_law import UNIT, QuantisedLaw
from speculative.draft_pool import DraftPool
from speculative.drawn_window import DrawnWindow
from speculative.errors import MalformedDraft
from speculative.fragment import Fragment, Offer
from speculative.hashing import prefix_hash
from speculative.implementations import load_implementation
from speculative.window_shape import SHAPES, WindowShape
from speculative.windows import LevelRates, WindowPool, WindowRanking

IDS = (1, 2, 3)
WIDTH = 10
EVEN = QuantisedLaw(np.arange(4, 8), np.full(4, UNIT // 4))


def pool(limit: int = 50, *, distinct: bool = False) -> WindowPool:
    points = DraftPool(IDS, epoch=6, vocabulary_size=WIDTH, limit=limit)
    return WindowPool(points, vocabulary_size=WIDTH, limit=limit, distinct=distinct)


def window(
    tokens: tuple[int, ...] = (4, 5, 6), ids: tuple[int, ...] = IDS, parents: Any = None, **changes: Any
) -> DrawnWindow:
    """A window below these ids, by default a chain."""
    above = tuple(range(-1, len(tokens) - 1)) if parents is None else parents
    laws = (EVEN,) * len({-1, *above})
    fields = {"source": 1, "epoch": 6, "base": len(ids), "prefix_hash": prefix_hash(ids), "laws": laws}
    return DrawnWindow(tokens=tokens, parents=above, survival=(1.0,) * len(tokens), **{**fields, **changes})


def ranking(of: WindowPool, node_limit: int = 16) -> WindowRanking:
    found = of.rank(node_limit)
    assert isinstance(found, WindowRanking)
    return found


def test_a_round_takes_whole_levels_whatever_was_drawn() -> None:
    """Repeated draws share a node, and a level costs the same entries all the same."""
    for tokens in ((4, 4, 5, 6, 7), (4, 5, 6, 7, 4)):
        taken = pool()
        parents = (-1, -1, -1, 0, 2)
        assert taken.offer(window(tokens, parents=parents)).kept == 5
        ranked = ranking(taken)
        assert len(ranked.survivals) == 6, "two levels of three"
        assert [ranked.cut(count).depth for count in range(7)] == [0, 0, 0, 1, 1, 1, 2]
        assert len(ranked.cut(3).drawn[-1]) == 3
        assert ranked.survivals == sorted(ranked.survivals, reverse=True)


def test_a_repeated_draw_stays_in_the_order_and_shares_its_node() -> None:
    taken = pool()
    taken.offer(window((4, 5, 4), parents=(-1, -1, -1)))
    cut = ranking(taken).cut(3)
    assert cut.tree.tokens == (4, 5)
    assert [draw.node for draw in cut.drawn[-1]] == [0, 1, 0]


def test_point_masses_stand_behind_what_was_drawn() -> None:
    taken = pool()
    taken.offer(window((4, 5)))
    points = Fragment(2, 6, 3, prefix_hash(IDS), (4, 9, 8), (-1, 0, -1), (0.99, 0.98, 0.01))
    assert taken.offer(points).kept == 3
    ranked = ranking(taken)
    tree = ranked.tree(99)
    assert tree.tokens == (4, 5, 9, 8)
    assert tree.parents == (-1, 0, 0, -1)
    assert tree.sources == (1, 1, 2, 2)
    assert set(ranked.cut(99).drawn) == {-1, 0}
    assert sum(ranked.sources(99).values()) == 5


def test_bases_only_rise() -> None:
    taken = pool()
    assert taken.offer(window()).kept == 3
    assert taken.offer(window()).duplicate == 3
    taken.commit((4,))
    assert taken.offer(window((7,), (*IDS, 4))).kept == 1
    assert taken.offer(window()).duplicate == 3


def test_a_late_window_is_walked_forward_and_one_off_the_path_is_stale() -> None:
    taken = pool()
    taken.commit((4, 5))
    assert taken.offer(window((4, 5, 6))) == Offer(kept=3)
    assert ranking(taken).tree(9).tokens == (6,)
    off = pool()
    off.commit((9,))
    assert off.offer(window()) == Offer(stale=3)
    assert off.is_bare
    used_up = pool()
    used_up.commit((4, 5, 6))
    assert used_up.offer(window()) == Offer(stale=3)


@pytest.mark.parametrize(
    ("changes", "offer"),
    [
        ({"epoch": 5}, Offer(stale=3)),
        ({"base": 7}, Offer(refused=3)),
        ({"prefix_hash": 1}, Offer(stale=3)),
    ],
)
def test_a_window_of_elsewhere_is_dropped(changes: dict[str, int], offer: Offer) -> None:
    taken = pool()
    assert taken.offer(window(**changes)) == offer
    assert taken.is_bare
    assert taken.drafted_by_source == {1: 3}


def test_windows_come_from_one_source_until_it_is_silent() -> None:
    taken = pool()
    assert taken.offer(window()).kept == 3
    ids = IDS
    for _ in range(8):
        ids = (*ids, 9)
        assert taken.offer(window((4,), ids[:-1], source=2)).kept == 0
        taken.commit((9,))
    assert taken.offer(window((4,), ids, source=2)).kept == 1
    assert taken.offer(window((4,), ids, source=1)).refused == 1


def test_malformed_windows_are_said_to_be() -> None:
    with pytest.raises(MalformedDraft, match="q holds id 10; ids are below 10"):
        pool().offer(window((4,), laws=(QuantisedLaw(np.array([4, 10]), np.array([1, UNIT - 1])),)))
    with pytest.raises(MalformedDraft, match="above the session's 6"):
        pool().offer(window(epoch=7))
    with pytest.raises(MalformedDraft, match="siblings without repetition"):
        pool(distinct=True).offer(window((4, 4), parents=(-1, -1)))


def test_nothing_is_drawn_at_or_behind_the_last_id() -> None:
    """The last id is at limit - 1, and the target itself chooses it."""
    taken = pool(limit=len(IDS) + 3)
    taken.offer(window())
    assert ranking(taken).tree(99).tokens == (4, 5)


def test_a_round_that_judged_all_leaves_nothing_and_one_that_judged_some_leaves_the_rest() -> None:
    for judged, left in ((3, ()), (1, (6,))):
        taken = pool()
        taken.offer(window())
        ranking(taken)
        taken.judges(judged)
        taken.commit((4, 5) if judged == 1 else (4, 5, 6, 7))
        assert taken.is_bare == (not left)
        if left:
            assert ranking(taken).tree(9).tokens == left


def test_levels_learn_from_rounds_that_judged_them() -> None:
    rates = LevelRates()
    first = rates.survivals(3)
    assert first == pytest.approx([0.7, 0.49, 0.343])
    for _ in range(50):
        rates.judged(3, 1)
    found = rates.survivals(3)
    assert found[0] > 0.98
    assert found[1] < 0.02
    for _ in range(300):
        rates.judged(0, 0)
    assert rates.survivals(3) == pytest.approx(first, abs=0.01), "a window gets another try some day"


def test_what_was_drafted_along_counts_the_windows_source() -> None:
    taken = pool()
    taken.offer(window())
    assert taken.drafted_along((4, 9)) == [], "the window came after the pass began"
    ranking(taken)
    assert [(place.drafted, place.right) for place in taken.drafted_along((4, 9))] == [
        ((1,), (1,)),
        ((1,), ()),
    ]


def test_every_criterion_that_needs_q_has_a_shape() -> None:
    needing = {name for name in SERVED_CRITERIA if load_implementation(CRITERIA, name).needs_q}
    assert needing == SHAPES.keys()
    assert SHAPES["k_seq"].within(5) == WindowShape(3, 1)
    assert SHAPES["ratio"].within(4) == WindowShape(1, 4)
    assert SHAPES["without_replacement"].within(2) == WindowShape(2, 1, distinct=True)
