import pytest
from hypothesis import given
from hypothesis import strategies as st

from speculative.acceptance.path_match import path_match
from speculative.tree import EMPTY_TREE, TokenTree

TREE = TokenTree((7, 8, 9, 5, 6), (-1, 0, 1, 1, -1), (0.9, 0.8, 0.7, 0.1, 0.05), (1, 1, 2, 1, 2))


@pytest.mark.parametrize(
    ("truth", "path", "tokens"),
    [
        ((1,), (), (1,)),
        ((6, 2), (4,), (6, 2)),
        ((7, 8, 5, 3), (0, 1, 3), (7, 8, 5, 3)),
        ((7, 8, 4), (0, 1), (7, 8, 4)),
    ],
)
def test_drafted_tokens_are_followed_as_far_as_the_target_agrees(
    truth: tuple[int, ...], path: tuple[int, ...], tokens: tuple[int, ...]
) -> None:
    match = path_match(TREE, lambda node, above: truth[len(above)])
    assert match.path == path
    assert match.tokens == tokens


def test_without_drafts_a_round_commits_the_targets_own_token() -> None:
    match = path_match(EMPTY_TREE, lambda node, above: 3)
    assert (match.path, match.tokens) == ((), (3,))


@given(truth=st.lists(st.integers(5, 9), min_size=6, max_size=6))
def test_the_target_is_asked_once_per_visited_node_with_the_path_to_it(truth: list[int]) -> None:
    asked: list[tuple[int, tuple[int, ...]]] = []

    def target(node: int, above: tuple[int, ...]) -> int:
        asked.append((node, above))
        return truth[len(above)]

    match = path_match(TREE, target)
    assert [node for node, _ in asked] == [-1, *match.path]
    for node, above in asked:
        assert above == tuple(TREE.tokens[n] for n in TREE.path(node))
