"""The leaves below which a cheap source goes on: the likeliest ones that it has not drafted itself."""

from speculative.draft_pool import DraftPool
from speculative.fragment import Fragment
from speculative.hashing import prefix_hash

IDS = (3, 4)
NEURAL, OWN = 1, 2


def drafted(
    tokens: tuple[int, ...], parents: tuple[int, ...], survival: tuple[float, ...], source: int = NEURAL
) -> Fragment:
    return Fragment(source, 1, len(IDS), prefix_hash(IDS), tokens, parents, survival)


def pool_of(*fragments: Fragment) -> DraftPool:
    pool = DraftPool(IDS, epoch=1, vocabulary_size=64, limit=64)
    for fragment in fragments:
        pool.offer(fragment)
    return pool


TREE = drafted((5, 6, 7, 8), (-1, 0, 0, -1), (0.8, 0.5, 0.2, 0.1))


def test_the_likeliest_leaves_come_first_with_their_paths_and_the_hash_of_their_prefix() -> None:
    found = pool_of(TREE).leaves(2, 0.0, frozenset())
    assert [leaf.path for leaf in found] == [(5, 6), (5, 7)]
    assert [round(leaf.survival, 6) for leaf in found] == [0.5, 0.2]
    assert [leaf.hash for leaf in found] == [prefix_hash((*IDS, *leaf.path)) for leaf in found]


def test_unlikely_leaves_and_those_of_the_cheap_source_itself_are_left_out() -> None:
    own = drafted((5, 6), (-1, 0), (0.9, 0.9), source=OWN)
    assert [leaf.path for leaf in pool_of(TREE, own).leaves(8, 0.0, {OWN})] == [(5, 7), (8,)]
    assert [leaf.path for leaf in pool_of(TREE).leaves(8, 0.15, frozenset())] == [(5, 6), (5, 7)]
    assert pool_of().leaves(8, 0.0, frozenset()) == []


def test_a_leaf_that_was_continued_is_one_no_longer() -> None:
    pool = pool_of(TREE)
    (leaf,) = pool.leaves(1, 0.0, {OWN})
    pool.offer(Fragment(OWN, 1, len(IDS) + len(leaf.path), leaf.hash, (9,), (-1,), (0.6,)))
    assert [leaf.path for leaf in pool.leaves(8, 0.0, {OWN})] == [(5, 7), (8,)]
    tree = pool.best_tree(8)
    assert round(dict(zip(tree.tokens, tree.survival, strict=True))[9], 6) == 0.3


def test_survivals_are_those_after_a_commit() -> None:
    pool = pool_of(TREE)
    pool.commit((5,))
    found = pool.leaves(8, 0.0, frozenset())
    assert [leaf.path for leaf in found] == [(6,), (7,)]
    assert [round(leaf.survival, 6) for leaf in found] == [0.625, 0.25]
