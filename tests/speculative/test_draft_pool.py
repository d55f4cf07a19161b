"""One behaviour at a time; test_draft_pool_properties.py has the law."""

import tracemalloc
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from speculative.draft_pool import DraftPool
from speculative.errors import MalformedDraft
from speculative.fragment import Fragment, Offer
from speculative.hashing import prefix_hash
from speculative.marginal import DraftedPlace
from speculative.tree import EMPTY_TREE

IDS = [10, 11, 12]


def pool(**changes: Any) -> DraftPool:
    return DraftPool(IDS, **({"epoch": 5, "vocabulary_size": 100, "limit": 50} | changes))


def chain(
    prefix: Sequence[int], *tokens: int, survival: float = 0.9, source: int = 1, epoch: int = 5
) -> Fragment:
    """`tokens` in a row after `prefix`; each has the same survival given the one before."""
    return Fragment(
        source=source,
        epoch=epoch,
        base=len(prefix),
        prefix_hash=prefix_hash(prefix),
        tokens=tokens,
        parents=tuple(range(-1, len(tokens) - 1)),
        survival=tuple(survival ** (i + 1) for i in range(len(tokens))),
    )


def paths(drafts: DraftPool, node_limit: int = 100) -> set[tuple[int, ...]]:
    tree = drafts.best_tree(node_limit)
    return {tuple(tree.tokens[n] for n in tree.path(node)) for node in range(len(tree))}


def test_a_chain_at_the_head_is_kept() -> None:
    drafts = pool()
    assert drafts.offer(chain(IDS, 1, 2)) == Offer(kept=2)
    tree = drafts.best_tree(8)
    assert tree.tokens == (1, 2)
    assert tree.parents == (-1, 0)
    assert tree.survival == pytest.approx((0.9, 0.81))
    assert tree.sources == (1, 1)


def test_a_pool_without_drafts_is_plain_decoding() -> None:
    assert pool().best_tree(8) is EMPTY_TREE
    drafts = pool()
    drafts.offer(chain(IDS, 1))
    assert drafts.best_tree(0) is EMPTY_TREE


def test_a_base_behind_is_walked_forward() -> None:
    drafts = pool()
    drafts.commit([1, 2])
    assert drafts.offer(chain(IDS, 1, 2, 3, 4)) == Offer(kept=2, duplicate=2)
    assert paths(drafts) == {(3,), (3, 4)}
    assert drafts.best_tree(8).survival == pytest.approx((0.9, 0.81))


def test_branches_off_the_committed_path_are_stale_and_the_rest_is_kept() -> None:
    drafts = pool()
    drafts.commit([1])
    late = Fragment(1, 5, 3, prefix_hash(IDS), (1, 9, 2, 8), (-1, -1, 0, 1), (0.9, 0.1, 0.8, 0.1))
    assert drafts.offer(late) == Offer(kept=1, stale=2, duplicate=1)
    assert paths(drafts) == {(2,)}


def test_a_fragment_of_which_nothing_is_left_is_stale() -> None:
    drafts = pool()
    drafts.commit([1, 2, 3])
    assert drafts.offer(chain(IDS, 1, 2)) == Offer(stale=2)
    assert drafts.offer(chain(IDS, 9, 9, 9, 9)) == Offer(stale=4)
    assert drafts.drafted == 0


def test_a_wrong_hash_at_a_committed_length_is_stale() -> None:
    drafts = pool()
    assert drafts.offer(chain([10, 11, 99], 1)) == Offer(stale=1)
    assert drafts.offer(chain([10, 99], 12, 1)) == Offer(stale=2)


def test_an_older_epoch_is_stale_and_a_future_one_malformed() -> None:
    drafts = pool()
    assert drafts.offer(chain(IDS, 1, epoch=4)) == Offer(stale=1)
    with pytest.raises(MalformedDraft, match="epoch 6"):
        drafts.offer(chain(IDS, 1, epoch=6))
    assert drafts.drafted == 0


def test_an_id_outside_the_vocabulary_is_malformed() -> None:
    drafts = pool()
    with pytest.raises(MalformedDraft, match="id 100"):
        drafts.offer(chain(IDS, 1, 100))
    assert drafts.drafted == 0


def test_a_fragment_grows_on_a_drafted_node_that_it_names_by_hash() -> None:
    drafts = pool()
    drafts.offer(chain(IDS, 1, 2))
    assert drafts.offer(chain([*IDS, 1, 2], 3, source=2)) == Offer(kept=1)
    assert drafts.offer(chain([*IDS, 1], 7, source=2)) == Offer(kept=1)
    assert paths(drafts) == {(1,), (1, 2), (1, 2, 3), (1, 7)}


def test_a_node_that_was_committed_meanwhile_is_still_a_base() -> None:
    drafts = pool()
    drafts.offer(chain(IDS, 1, 2))
    drafts.commit([1, 2])
    assert drafts.offer(chain([*IDS, 1], 2, 3)) == Offer(kept=1, duplicate=1)
    assert drafts.offer(chain([*IDS, 1, 2], 4)) == Offer(kept=1)
    assert paths(drafts) == {(3,), (4,)}


def test_a_base_not_known_yet_waits_for_its_node() -> None:
    drafts = pool()
    assert drafts.offer(chain([*IDS, 1, 2], 3)) == Offer(unanchored=1)
    assert drafts.offer(chain([*IDS, 1], 2)) == Offer(unanchored=1)
    assert drafts.drafted == 0
    assert drafts.offer(chain(IDS, 1)) == Offer(kept=1)
    assert paths(drafts) == {(1,), (1, 2), (1, 2, 3)}
    assert drafts.unanchored == 0
    assert drafts.totals.kept == 3


def test_a_base_not_known_yet_waits_for_the_commit() -> None:
    drafts = pool()
    drafts.offer(chain([*IDS, 1], 2, 3))
    drafts.offer(chain([*IDS, 9], 2, 3))
    assert drafts.commit([1]) == 2
    assert paths(drafts) == {(2,), (2, 3)}
    assert drafts.unanchored == 0
    assert drafts.totals.stale == 2


def test_a_drafted_nodes_hash_at_another_length_names_no_base() -> None:
    drafts = pool()
    drafts.offer(chain(IDS, 1, 2))
    lying = Fragment(1, 5, len(IDS) + 5, prefix_hash([*IDS, 1]), (7,), (-1,), (0.5,))
    assert drafts.offer(lying) == Offer(unanchored=1)
    assert paths(drafts) == {(1,), (1, 2)}


def test_waiting_is_bounded_per_source_and_the_oldest_goes_first() -> None:
    drafts = pool(unanchored_cap=2)
    for token in (1, 2, 3):
        assert drafts.offer(chain([*IDS, token], 7)) == Offer(unanchored=1)
    drafts.offer(chain([*IDS, 1], 8, source=2))
    assert drafts.unanchored == 3
    assert drafts.totals.refused == 1
    drafts.offer(chain(IDS, 1))
    drafts.offer(chain(IDS, 2))
    assert paths(drafts) == {(1,), (2,), (1, 8), (2, 7)}


def test_the_same_fragment_waits_once() -> None:
    drafts = pool(unanchored_cap=2)
    drafts.offer(chain([*IDS, 1], 7, 8))
    assert drafts.offer(chain([*IDS, 1], 7, 8)) == Offer(duplicate=2)
    assert drafts.unanchored == 1


def test_a_node_counts_for_the_first_source_and_has_the_higher_survival() -> None:
    drafts = pool()
    drafts.offer(chain(IDS, 1, 2, survival=0.5, source=2))
    assert drafts.offer(chain(IDS, 1, survival=0.8, source=1)) == Offer(duplicate=1)
    drafts.offer(chain(IDS, 1, survival=0.1, source=3))
    tree = drafts.best_tree(8)
    assert tree.sources == (2, 2)
    assert tree.survival == pytest.approx((0.8, 0.4))


def test_the_sources_of_every_committed_position_are_known_until_nothing_was_drafted() -> None:
    drafts = pool()
    drafts.offer(chain(IDS, 1, 2, source=1))
    drafts.offer(chain(IDS, 1, 5, source=2))
    drafts.rank(8)
    both = (1, 2)
    assert drafts.drafted_along([1, 2, 7]) == [DraftedPlace(both, (1, 2)), DraftedPlace(both, (1,))]
    assert drafts.drafted_along([9, 2]) == [DraftedPlace(both, ())]
    drafts.commit([1])
    assert drafts.drafted_along([5]) == [DraftedPlace(both, (2,))]
    drafts.commit([7])
    assert drafts.drafted_along([1]) == []


def test_a_draft_that_comes_after_the_ranking_was_not_there() -> None:
    drafts = pool()
    drafts.offer(chain(IDS, 1, source=1))
    drafts.rank(8)
    drafts.offer(chain(IDS, 1, 2, source=2))
    alone = (1,)
    assert drafts.drafted_along([1, 2]) == [DraftedPlace(alone, (1,))]
    drafts.rank(8)
    assert drafts.drafted_along([1, 2])[0].right == (1, 2)


def test_a_source_that_had_drafted_below_a_node_was_there_though_another_draft_of_it_came_late() -> None:
    drafts = pool()
    drafts.offer(chain(IDS, 1, source=1))
    drafts.rank(8)
    drafts.offer(chain(IDS, 2, source=1))
    drafts.offer(chain(IDS, 2, source=3))
    alone = (1,)
    assert drafts.drafted_along([2]) == [DraftedPlace(alone, ())]
    drafts.commit([2])
    drafts.offer(chain((*IDS, 2), 5, source=3))
    drafts.rank(8)
    assert drafts.drafted_along([5]) == [DraftedPlace((3,), (3,))]


def test_nodes_are_counted_by_all_sources_that_offered_them() -> None:
    drafts = pool()
    drafts.offer(chain(IDS, 1, 2, survival=0.9, source=2))
    drafts.offer(chain(IDS, 1, survival=0.8, source=1))
    drafts.offer(chain(IDS, 3, survival=0.1, source=2))
    assert drafts.rank(8).sources(2) == {(2, 1): 1, (2,): 1}
    assert drafts.rank(8).sources(8) == {(2, 1): 1, (2,): 2}


def test_offers_are_counted_by_source_whatever_becomes_of_them() -> None:
    drafts = pool()
    drafts.offer(chain(IDS, 1, 2, source=1))
    drafts.offer(chain(IDS, 1, 2, source=2))
    drafts.offer(chain([*IDS, 9, 9], 1, source=2))
    drafts.offer(chain(IDS, 1, source=2, epoch=1))
    assert drafts.drafted_by_source == {1: 2, 2: 3}


def test_a_commit_keeps_only_what_lies_below_it() -> None:
    drafts = pool()
    drafts.offer(chain(IDS, 1, 2, 3))
    drafts.offer(chain(IDS, 1, 7, 8))
    drafts.offer(chain(IDS, 9, 9))
    assert drafts.commit([1]) == 2
    assert paths(drafts) == {(2,), (2, 3), (7,), (7, 8)}
    assert drafts.commit([7]) == 2
    assert paths(drafts) == {(8,)}
    assert drafts.commit([5]) == 1
    assert drafts.drafted == 0
    assert drafts.totals.outrun == 5


def test_hashes_follow_the_committed_ids() -> None:
    drafts = pool()
    drafts.commit([4, 5])
    assert drafts.length == 5
    assert [drafts.hash_at(n) for n in range(6)] == [prefix_hash([*IDS, 4, 5][:n]) for n in range(6)]


def test_the_best_nodes_are_connected_and_the_best_path_leads() -> None:
    drafts = pool()
    tokens, parents = (1, 2, 3, 4, 5), (-1, -1, 1, 2, 0)
    drafts.offer(Fragment(1, 5, 3, prefix_hash(IDS), tokens, parents, (0.3, 0.6, 0.5, 0.1, 0.2)))
    assert drafts.best_tree(5).tokens == (2, 3, 4, 1, 5)
    assert drafts.best_tree(3).tokens == (2, 3, 1)
    assert drafts.best_tree(3).parents == (-1, 0, -1)


def test_nothing_is_offered_where_nothing_can_be_accepted() -> None:
    """With limit 6 the last id stands at position 5, and the row before it predicts it without any draft."""
    drafts = pool(limit=6)
    assert drafts.offer(chain(IDS, 1, 2, 3, 4)) == Offer(kept=2, refused=2)
    assert paths(drafts) == {(1,), (1, 2)}
    assert drafts.offer(chain([*IDS, 1, 2], 3)) == Offer(refused=1)
    assert drafts.offer(chain([*IDS, 8, 8], 3)) == Offer(refused=1)
    assert pool(limit=4).offer(chain(IDS, 1)) == Offer(refused=1)


def test_one_source_cannot_fill_the_pool() -> None:
    drafts = pool(node_cap=8, limit=1000)
    assert drafts.offer(chain(IDS, *range(1, 11))) == Offer(kept=4, refused=6)
    assert drafts.offer(chain(IDS, *range(20, 30), source=2)) == Offer(kept=4, refused=6)
    assert drafts.offer(chain(IDS, 50, source=3)) == Offer(refused=1)
    assert drafts.drafted == 8
    drafts.commit([1, 2])
    assert drafts.drafted == 2
    assert drafts.offer(chain([*IDS, 1, 2], 60, 61, 62, source=2)) == Offer(kept=3)


def test_a_survival_of_zero_is_no_division_by_zero() -> None:
    drafts = pool()
    drafts.offer(Fragment(1, 5, 3, prefix_hash(IDS), (1, 2), (-1, 0), (0.0, 0.0)))
    assert drafts.best_tree(2).survival == (0.0, 0.0)
    drafts.commit([1])
    assert drafts.best_tree(2).survival == (1.0,)


def test_a_hundred_thousand_fragments_leave_nothing_behind() -> None:
    random = Random(0)
    drafts = DraftPool([1], epoch=5, vocabulary_size=100, limit=10**9, node_cap=64, unanchored_cap=8)
    committed = [1]

    def feed(count: int) -> None:
        for turn in range(count):
            kind = random.random()
            base, hash_ = drafts.length, drafts.hash_at(drafts.length)
            if kind < 0.3:
                base = random.randrange(max(1, base - 4), base + 1)
                hash_ = drafts.hash_at(base)
            elif kind < 0.6:
                base, hash_ = base + random.randrange(1, 9), random.getrandbits(64)
            tokens = (random.randrange(3), random.randrange(3))
            drafts.offer(Fragment(random.randrange(1, 4), 5, base, hash_, tokens, (-1, 0), (0.5, 0.4)))
            if turn % 50 == 0:
                committed.append(random.randrange(3))
                drafts.commit(committed[-1:])
            assert drafts.drafted <= 64
            assert drafts.unanchored <= 24

    feed(5_000)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        feed(5_000)
        settled = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    feed(90_000)
    assert settled < 50_000
    drafts.commit([9] * 20)
    assert drafts.drafted == 0
    assert drafts.unanchored == 0
    totals = drafts.totals
    assert totals.kept + totals.stale + totals.duplicate + totals.refused == 200_000
    assert sum(drafts.drafted_by_source.values()) == 200_000
