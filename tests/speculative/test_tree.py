import pytest

from speculative.errors import MalformedDraft
from speculative.tree import EMPTY_TREE, ROOT, TokenTree

#   root ─ 0:7 ─ 1:8 ─ 2:9
#        │       └ 3:5
#        └ 4:6
TREE = TokenTree((7, 8, 9, 5, 6), (-1, 0, 1, 1, -1), (0.9, 0.8, 0.7, 0.1, 0.05), (1, 1, 2, 1, 2))


def test_children_and_paths_follow_from_parents() -> None:
    assert TREE.children(ROOT) == {7: 0, 6: 4}
    assert TREE.children(1) == {9: 2, 5: 3}
    assert TREE.children(4) == {}
    assert TREE.path(3) == (0, 1, 3)
    assert TREE.path(ROOT) == ()
    assert len(TREE) == 5


def test_the_empty_tree_is_plain_decoding() -> None:
    assert len(EMPTY_TREE) == 0
    assert EMPTY_TREE.children(ROOT) == {}


@pytest.mark.parametrize("parents", [(1, -1), (0, -1), (-1, 1), (-1, -2), (-1, 5)])
def test_a_parent_must_precede_its_child(parents: tuple[int, ...]) -> None:
    with pytest.raises(MalformedDraft, match="precedes"):
        TokenTree((7, 8), parents, (0.5, 0.5), (1, 1))


def test_siblings_carry_different_tokens() -> None:
    with pytest.raises(MalformedDraft, match="repeats token 7"):
        TokenTree((7, 7), (-1, -1), (0.5, 0.5), (1, 1))
    assert len(TokenTree((7, 7), (-1, 0), (0.5, 0.5), (1, 1))) == 2


@pytest.mark.parametrize(
    ("parents", "survival", "sources"),
    [((), (0.5,), (1,)), ((-1,), (), (1,)), ((-1,), (0.5,), ())],
)
def test_entries_line_up(
    parents: tuple[int, ...], survival: tuple[float, ...], sources: tuple[int, ...]
) -> None:
    with pytest.raises(MalformedDraft, match="one of each per node"):
        TokenTree((7,), parents, survival, sources)


@pytest.mark.parametrize("survival", [(0.5, -0.1), (0.5, 1.1), (0.5, float("nan"))])
def test_survival_is_a_probability(survival: tuple[float, ...]) -> None:
    with pytest.raises(MalformedDraft, match="survival"):
        TokenTree((7, 8), (-1, 0), survival, (1, 1))


def test_source_index_0_is_the_targets_own() -> None:
    with pytest.raises(MalformedDraft, match="sources"):
        TokenTree((7,), (-1,), (0.5,), (0,))
