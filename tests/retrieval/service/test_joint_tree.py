"""What several memories found is one tree: within its bounds, connected, each node of one source."""

from hypothesis import given
from hypothesis import strategies as st

from retrieval_service.joint_tree import WITNESS, FoundTrie, JointTree, Sampling, TreeBounds
from retrieval_service.ranking import DraftShape
from retrieval_service.trie import CountedTrie, counted
from retrieval_service.trust import SessionTrust, TrustBook

SHAPE = DraftShape(floor=0.0)
WIDTH = 4
continuations = st.lists(st.lists(st.integers(0, WIDTH), min_size=1, max_size=5), min_size=1, max_size=12)


def trie_of(texts: list[list[int]], match_length: int = 4) -> CountedTrie:
    trie = counted(texts, match_length, 64)
    assert trie is not None
    return trie


def paths(trie: CountedTrie) -> set[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for token, parent in zip(trie.tokens, trie.parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return set(found)


def joined(
    tries: dict[int, CountedTrie], trust: SessionTrust, sampled: bool, nodes: int = 64, depth: int = 16
) -> JointTree:
    found = {source: FoundTrie(f"memory {source}", trie) for source, trie in tries.items()}
    return JointTree(
        found, trust, Sampling(3, 40) if sampled else None, SHAPE, TreeBounds(nodes, depth, WIDTH)
    )


@given(
    texts=st.dictionaries(st.integers(WITNESS, 3), continuations, min_size=1),
    sampled=st.booleans(),
    nodes=st.integers(1, 20),
    depth=st.integers(1, 5),
)
def test_the_tree_is_connected_and_within_its_bounds(
    texts: dict[int, list[list[int]]], sampled: bool, nodes: int, depth: int
) -> None:
    tries = {source: trie_of(rows) for source, rows in texts.items()}
    tree = joined(tries, TrustBook().session("t"), sampled, nodes, depth)
    assert len(tree.nodes) <= nodes
    place = {node: index for index, node in enumerate(tree.nodes)}
    for index, node in enumerate(tree.nodes):
        path = [node.token]
        above = node.parent
        while above is not None and above.parent is not None:
            assert place[above] < index
            assert above.survival >= node.survival
            path.append(above.token)
            above = above.parent
        assert len(path) == node.depth <= depth
        assert max(path) < WIDTH
        assert node.source != WITNESS
        assert tuple(reversed(path)) in paths(tries[node.source]), "a node counts for a memory that has it"
        assert 0 <= node.given_parent <= 1


@given(texts=st.dictionaries(st.integers(1, 3), continuations, min_size=1))
def test_siblings_promise_no_more_than_one_token(texts: dict[int, list[list[int]]]) -> None:
    tree = joined({source: trie_of(rows) for source, rows in texts.items()}, TrustBook().session("t"), False)
    for parent in {node.parent for node in tree.nodes}:
        assert sum(node.given_parent for node in tree.nodes if node.parent is parent) < 1


def test_all_paths_of_all_memories_are_there_where_there_is_room() -> None:
    tries = {1: trie_of([[1, 2], [1, 3]]), 2: trie_of([[1, 2], [2]]), WITNESS: trie_of([[3, 3]])}
    tree = joined(tries, TrustBook().session("t"), sampled=False)
    found = {(node.parent.token if node.parent else None, node.token) for node in tree.nodes}
    assert found == {(-1, 1), (-1, 2), (1, 2), (1, 3)}, "but those of the witness"


def test_what_is_committed_in_pieces_teaches_as_if_at_once() -> None:
    tries = {1: trie_of([[1, 2, 3]]), 2: trie_of([[1, 3, 3]])}
    whole, pieces = TrustBook().session("t"), TrustBook().session("t")
    joined(tries, whole, sampled=False).commit([1, 2, 3])
    tree = joined(tries, pieces, sampled=False)
    for tokens in ([1], [2, 3], [0]):
        tree.commit(tokens)
    again = [joined(tries, trust, sampled=False).nodes for trust in (whole, pieces)]
    first, second = [[(node.token, node.survival) for node in nodes] for nodes in again]
    assert first == second
    untaught = joined(tries, TrustBook().session("t"), sampled=False).nodes
    assert first != [(node.token, node.survival) for node in untaught]
