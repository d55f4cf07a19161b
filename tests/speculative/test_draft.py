import pytest

from speculative.draft import MAX_DRAFT_NODES, Draft
from speculative.errors import MalformedDraft


def chain(count: int) -> Draft:
    return Draft((7,) * count, tuple(range(-1, count - 1)), (0.5,) * count)


@pytest.mark.parametrize("count", [1, 2, MAX_DRAFT_NODES])
def test_a_draft_has_as_many_nodes_as_tokens(count: int) -> None:
    assert len(chain(count)) == count


@pytest.mark.parametrize("count", [0, MAX_DRAFT_NODES + 1])
def test_a_draft_has_between_one_node_and_255(count: int) -> None:
    with pytest.raises(MalformedDraft, match=f"{count} nodes; send 1 to 255"):
        chain(count)


@pytest.mark.parametrize(
    ("tokens", "parents", "survival", "complaint"),
    [
        ((7, 8), (-1,), (0.9, 0.5), "1 parents"),
        ((7, 8), (-1, 0), (0.9,), "1 survivals"),
        ((7, 8), (-1, 1), (0.9, 0.5), "node 1 has parent 1"),
        ((7, 8), (1, -1), (0.9, 0.5), "node 0 has parent 1"),
        ((7, 8), (-1, -2), (0.9, 0.5), "node 1 has parent -2"),
        ((7, 8), (-1, 0), (0.9, 1.5), "survival 1.5"),
        ((7, 8), (-1, 0), (0.9, float("nan")), "survival nan"),
        ((7, -8), (-1, 0), (0.9, 0.5), "negative id -8"),
    ],
)
def test_a_draft_that_is_no_tree_is_malformed(
    tokens: tuple[int, ...], parents: tuple[int, ...], survival: tuple[float, ...], complaint: str
) -> None:
    with pytest.raises(MalformedDraft, match=complaint):
        Draft(tokens, parents, survival)
