"""Committing a path: what is kept, what it is called afterwards, and where its slots are."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.lm.kv.blocks import BLOCK
from outrider.lm.kv.pool import KVLayout, SlotPool
from outrider.lm.kv.table import SlotTable

LAYOUT = KVLayout(((1, 1), (1, 1)), torch.float32, torch.device("cpu"))


def table_with(parents: list[int], length: int = 3) -> SlotTable:
    """A table whose slot of committed position p holds -1 - p and whose slot of node j holds j."""
    pool = SlotPool(LAYOUT, max_slots=2048)
    table = SlotTable(pool)
    between = SlotTable(pool)
    while table.lacks(length + len(parents)):
        # Somebody else takes the block behind, so that the table lies in pieces.
        table.reserve(len(table.blocks) * BLOCK + 1)
        between._add(pool.take(1, table.blocks[-1]))
    table.length = length
    for parent in parents:
        table.depths.append(0 if parent < 0 else table.depths[parent] + 1)
        table.parents.append(parent)
    with torch.inference_mode():
        marks = [-1 - position for position in range(length)] + list(range(len(parents)))
        for view in pool.planes():
            view[:, table.slots(0, len(marks))] = torch.tensor(marks).float()[None, :, None]
    return table


def marks(table: SlotTable) -> list[int]:
    keys = table._pool.seen(table.runs(0, table.length + table.nodes))[0]
    return keys.flatten().int().tolist()


def test_the_subtree_below_the_path_is_kept_and_renumbered_in_order() -> None:
    table = table_with([-1, -1, 0, 1, 1, 3, 4, 2])

    renumbered = table.commit([1])

    assert renumbered == [-1, -1, -1, 0, 1, 2, 3, -1]
    assert (table.length, table.parents, table.depths) == (4, [-1, -1, 0, 1], [0, 0, 1, 1])
    assert marks(table) == [-1, -2, -3, 1, 3, 4, 5, 6]


def test_a_path_of_several_nodes_moves_them_to_their_positions() -> None:
    table = table_with([-1, -1, 1, 2, 3])

    assert table.commit([1, 2, 3]) == [-1, -1, -1, -1, 0]
    assert marks(table) == [-1, -2, -3, 1, 2, 3, 4]


def test_an_empty_path_keeps_everything() -> None:
    table = table_with([-1, 0, -1])

    assert table.commit([]) == [0, 1, 2]
    assert (table.length, table.parents) == (3, [-1, 0, -1])


@pytest.mark.parametrize("path", [[], [0], [1], [1, 3, 5], [1, 4, 6]])
def test_a_path_alone_may_be_kept_and_lies_where_it_would_anyway(path: list[int]) -> None:
    alone, usual = table_with([-1, -1, 0, 1, 1, 3, 4, 2]), table_with([-1, -1, 0, 1, 1, 3, 4, 2])
    usual.commit(path)
    usual.drop_nodes()

    alone.keep(path)

    assert (alone.length, alone.nodes) == (3 + len(path), 0)
    assert marks(alone) == marks(usual) == [-1, -2, -3, *path]


def test_dropping_nodes_keeps_what_is_committed() -> None:
    table = table_with([-1, 0])
    table.drop_nodes()

    assert (table.nodes, table.length) == (0, 3)


@pytest.mark.parametrize(
    ("path", "message"),
    [([2], "node 2 .* not one of the 2"), ([1], "node 1 .* has parent 0, not -1"), ([-1], "node -1")],
)
def test_a_path_that_is_not_a_chain_from_the_root_is_refused(path: list[int], message: str) -> None:
    table = table_with([-1, 0])

    with pytest.raises(ValueError, match=message):
        table.commit(path)
    with pytest.raises(ValueError, match=message):
        table.keep(path)
    assert (table.nodes, table.length) == (2, 3)


@given(data=st.data())
def test_any_commit_keeps_exactly_the_descendants_and_their_slots(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 14))
    parents = [data.draw(st.integers(-1, node - 1)) for node in range(count)]
    end = data.draw(st.integers(0, count - 1))
    path = _way(parents, end)
    table = table_with(parents)

    renumbered = table.commit(path)

    below = [node for node in range(count) if end in _way(parents, node)[:-1]]
    assert [node for node in range(count) if renumbered[node] >= 0] == below
    assert marks(table) == [-1, -2, -3, *path, *below]
    for node in below:
        parent = parents[node]
        assert table.parents[renumbered[node]] == (-1 if parent == end else renumbered[parent])
        assert table.depths[renumbered[node]] == len(_way(parents, node)) - len(path) - 1


def _way(parents: list[int], node: int) -> list[int]:
    way = []
    while node >= 0:
        way.append(node)
        node = parents[node]
    return way[::-1]
