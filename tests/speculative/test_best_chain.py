"""The chain that a target without branches verifies: the one that promises the most tokens."""

from fractions import Fraction
from random import Random

import pytest

from speculative.draft_nodes import NO_NODES, PoolNode, best_chain
from speculative.draft_pool import DraftPool
from speculative.fragment import Fragment
from speculative.hashing import prefix_hash

IDS = (3, 4)


def random_tree(dice: Random) -> PoolNode:
    """A tree of up to 14 nodes whose survivals are multiples of 1/64, so that their sums are exact."""
    root = PoolNode(0, 0, 1, 0)
    nodes = [root]
    for number in range(2, 2 + dice.randint(1, 14)):
        above = dice.choice(nodes)
        node = PoolNode(number, above.position + 1, number, above.hash)
        node.survival = dice.randint(1, int(above.survival * 64)) / 64
        node.estimated(1, node.survival, node.survival)
        above.children[number] = node
        nodes.append(node)
    return root


def chains_below(root: PoolNode, limit: int) -> list[list[PoolNode]]:
    """Every chain of up to `limit` nodes from a child of the root down."""
    if not limit:
        return [[]]
    found: list[list[PoolNode]] = [[]]
    for child in root.children.values():
        found += [[child, *rest] for rest in chains_below(child, limit - 1)]
    return found


def worth(chain: list[PoolNode]) -> Fraction:
    return sum((Fraction(node.survival) for node in chain), Fraction(0))


@pytest.mark.parametrize("limit", [1, 2, 3, 20])
def test_no_chain_within_the_limit_promises_more(limit: int) -> None:
    dice = Random(limit)
    for _ in range(200):
        root = random_tree(dice)
        ranked = best_chain(root, limit)
        assert 0 < len(ranked.survivals) <= limit
        assert sum(map(Fraction, ranked.survivals)) == max(map(worth, chains_below(root, limit)))
        for count in range(len(ranked.survivals) + 1):
            tree = ranked.tree(count)
            assert tree.parents == tuple(range(-1, count - 1))
            assert list(tree.survival) == ranked.survivals[:count]


def test_without_drafts_or_room_there_is_no_chain() -> None:
    assert best_chain(PoolNode(0, 0, 1, 0), 8) is NO_NODES
    assert best_chain(random_tree(Random(0)), 0) is NO_NODES


def test_a_long_sure_chain_goes_before_a_likelier_first_node() -> None:
    pool = DraftPool(IDS, epoch=1, vocabulary_size=50, limit=40)
    base = (len(IDS), prefix_hash(IDS))
    pool.offer(Fragment(1, 1, *base, (7,), (-1,), (0.6,)))
    pool.offer(Fragment(1, 1, *base, (9, 8, 7), (-1, 0, 1), (0.5, 0.5, 0.5)))

    assert pool.rank(1).tree(1).tokens == (7,)
    assert pool.rank_chain(8).tree(8).tokens == (9, 8, 7)
    assert pool.rank_chain(8).sources(1) == {(1,): 1}
