"""The draft tree: what is sent and expanded next, and what a commit leaves of it."""

import pytest

from drafter_service.draft_tree import DraftNode, DraftTree, Growth
from speculative import hashing

IDS = (5, 6, 7)


def tree(
    *, node_limit: int = 100, end: int = 100, eos: frozenset[int] = frozenset(), depth: int = 8
) -> DraftTree:
    """A tree below IDS whose root has two children, 1 (0.6) and 2 (0.3)."""
    grown = DraftTree(
        IDS[-1],
        len(IDS),
        hashing.prefix_hash(IDS),
        growth=Growth(floor=0.05, depth=depth),
        node_limit=node_limit,
        end=end,
        eos_ids=eos,
    )
    grown.expand(grown.root, [(1, 0.6), (2, 0.3)])
    return grown


def tokens(nodes: list[DraftNode]) -> list[int]:
    return [node.token for node in nodes]


def test_the_likeliest_leaf_is_expanded_first_wherever_it_is() -> None:
    grown = tree()
    grown.take_unsent()
    (first,) = grown.frontier(1)
    grown.expand(first, [(3, 0.4), (4, 0.4)])
    grown.take_unsent()
    assert first.token == 1
    assert tokens(grown.frontier(3)) == [2, 3, 4]  # 0.3 before twice 0.24


def test_a_node_is_sent_once_and_only_below_a_node_that_was_sent() -> None:
    grown = tree()
    assert tokens(grown.take_unsent()) == [1, 2]
    assert grown.take_unsent() == []
    (first,) = grown.frontier(1)
    grown.expand(first, [(3, 0.9)])
    assert tokens(grown.take_unsent()) == [3]


def test_no_more_nodes_are_in_flight_than_are_wanted_and_none_is_computed_for_nothing() -> None:
    grown = tree(node_limit=1)
    assert tokens(grown.take_unsent()) == [1]
    assert grown.in_flight == 1
    assert grown.frontier(1) == []


def test_room_that_a_commit_makes_is_used_without_computing_anything() -> None:
    grown = tree(node_limit=2)
    grown.take_unsent()
    assert grown.frontier(1) == []
    grown.commit([1])
    assert tokens(grown.frontier(1)) == []  # the new root is pending, its children are not known
    wide = tree(node_limit=3)
    wide.take_unsent()
    (first,) = wide.frontier(1)
    wide.expand(first, [(3, 0.5), (4, 0.4)])
    assert tokens(wide.take_unsent()) == [3]
    rerooted = wide.commit([1])
    assert tokens(wide.take_unsent()) == [4]
    assert (rerooted.kept, rerooted.dropped) == (1, 1)


def test_a_node_below_the_floor_waits_until_a_commit_makes_it_likely() -> None:
    grown = tree()
    grown.take_unsent()
    second = grown.frontier(2)[1]
    grown.expand(second, [(8, 0.5), (9, 0.1)])  # 0.15 and 0.03
    assert tokens(grown.take_unsent()) == [8]
    grown.commit([2])
    assert tokens(grown.take_unsent()) == [9]
    assert grown.root.children is not None
    assert grown.root.children[9].survival == pytest.approx(0.1)


def test_what_nodes_need_for_now_holds_them_back_and_loses_none() -> None:
    grown = tree()
    grown.required = 0.4
    assert tokens(grown.take_unsent()) == [1]
    (first,) = grown.frontier(4)
    grown.expand(first, [(3, 0.5), (4, 0.2)])  # 0.3 and 0.12
    assert grown.take_unsent() == []
    assert grown.frontier(4) == []
    grown.required = 0.2
    assert tokens(grown.take_unsent()) == [2, 3]
    assert tokens(grown.frontier(4)) == [2, 3]


def test_a_token_that_nobody_drafted_starts_a_new_tree() -> None:
    grown = tree()
    grown.take_unsent()
    rerooted = grown.commit([1, 17])
    assert tokens(list(rerooted.path)) == [1]
    assert (rerooted.kept, rerooted.dropped, grown.in_flight) == (0, 1, 0)
    assert grown.root.position == len(IDS) + 1
    assert grown.root.prefix_hash == hashing.prefix_hash([*IDS, 1, 17])


def test_hashes_and_positions_are_those_of_the_whole_path() -> None:
    grown = tree()
    grown.take_unsent()
    (first,) = grown.frontier(1)
    grown.expand(first, [(3, 0.9)])
    (third,) = grown.take_unsent()
    assert third.prefix_hash == hashing.prefix_hash([*IDS, 1, 3])
    assert third.position == len(IDS) + 1


@pytest.mark.parametrize(
    "bounded", [tree(end=len(IDS)), tree(depth=1), tree(eos=frozenset({1, 2}))], ids=["end", "depth", "eos"]
)
def test_leaves_at_a_bound_are_drafted_but_not_expanded(bounded: DraftTree) -> None:
    assert tokens(bounded.take_unsent()) == [1, 2]
    assert bounded.frontier(2) == []


def test_a_leaf_too_deep_is_expanded_once_the_root_comes_near() -> None:
    grown = tree(depth=2)
    grown.take_unsent()
    (first,) = grown.frontier(1)
    grown.expand(first, [(3, 0.9)])
    grown.take_unsent()
    assert tokens(grown.frontier(2)) == [2]
    grown.commit([1])
    assert tokens(grown.frontier(2)) == [3]
