"""How rows are dealt out to a kernel: every slot of every tile once, in as many items as there may be."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.lm.attention.metadata import MOST_BRANCHING, SPLIT_ITEMS
from outrider.lm.attention.partition import RowTiles, branch_masks, cut, items_of, trunk_of
from outrider.lm.attention.shapes import (
    BUCKETS,
    FEW_WANTED,
    GraphShape,
    all_shapes,
    graph_shape,
    smallest_holding,
)
from outrider.lm.kv.pool import KVLayout, SlotPool
from outrider.lm.kv.table import SlotTable
from outrider.lm.plan import PackedRows, SequenceRows

LAYOUT = KVLayout(((1, 1), (1, 1)), torch.float32, torch.device("cpu"))


def rows_of(*parents: list[int], length: int = 0) -> list[PackedRows]:
    """Sessions of so many committed positions, each with a tree of these parents in one pass."""
    found: list[PackedRows] = []
    pool = SlotPool(LAYOUT, max_slots=64)
    for each in parents:
        table = SlotTable(pool)
        table.length = length
        found.append(
            PackedRows(SequenceRows(table, [0] * len(each), each, []), found[-1].high if found else 0)
        )
    return found


Spans = list[tuple[int, int]]


def cut_spans(spans: Spans) -> tuple[list[list[int]], list[list[int]]]:
    begin, end = np.array(spans).T
    items, of_tiles = cut(begin, end)
    return items.tolist(), of_tiles.tolist()


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 40_000)), min_size=1, max_size=150))
def test_items_cover_every_slot_of_every_tile_once_and_are_no_more_than_there_may_be(spans: Spans) -> None:
    wanted = [(low, low + count) for low, count in spans]
    items, of_tiles = cut_spans(wanted)

    assert len(items) <= items_of(len(spans))
    joined = [item for item, count in of_tiles if count > 1]
    assert sum(count for _, count in of_tiles if count > 1) <= SPLIT_ITEMS
    assert max(joined, default=0) < SPLIT_ITEMS, "only the first items leave partial results"
    for tile, ((low, high), (item, count)) in enumerate(zip(wanted, of_tiles, strict=True)):
        own = items[item : item + count]
        assert {each[0] for each in own} == {tile}
        covered = [slot for _, first, last in own for slot in range(first, last)]
        assert covered == list(range(low, high))


def test_one_long_past_among_many_short_ones_is_cut_and_they_are_not() -> None:
    items, of_tiles = cut_spans([(0, 1000)] * 40 + [(0, 32_000)] + [(0, 1000)] * 40)

    longest = max(high - low for _, low, high in items)
    assert longest < 5000
    assert [count for _, count in of_tiles if count > 1] == [of_tiles[40][1]]


@pytest.mark.parametrize(
    ("trees", "wanted", "groups", "rows", "padded_wanted", "tile_rows"),
    [
        ([1], 1, 4, 1, 1, 4),
        ([4, 4, 4], 12, 4, 12, 12, 4),
        ([5], 5, 4, 8, 8, 16),
        ([64] * 4, 256, 4, 256, 256, 16),
        ([65], 65, 4, 72, 72, 16),
        ([1] * 8 + [500], 9, 4, 512, FEW_WANTED, 16),
        ([1] * 8 + [50], 9, 4, 64, 64, 16),
        ([4] * 80, 320, 4, 320, 320, 16),
        ([1], 1, 71, 1, 1, 1),
        ([9], 9, 71, 12, 12, 1),
        ([16], 16, 1, 16, 16, 16),
        ([17], 17, 1, 20, 20, 64),
        ([64] * 32, 2048, 4, 2048, 2048, 16),
        ([65] * 32, 2080, 4, 2304, 2304, 16),
    ],
)
def test_a_shape_is_the_next_size_and_the_tile_that_its_longest_tree_fills(
    trees: list[int], wanted: int, groups: int, rows: int, padded_wanted: int, tile_rows: int
) -> None:
    passed = rows_of(*([-1] * count for count in trees))
    found = graph_shape(passed, wanted, groups)

    assert found == GraphShape(rows, padded_wanted, tile_rows)
    assert any(found in shapes for shapes in all_shapes(BUCKETS[-1], groups))


@pytest.mark.parametrize("groups", [1, 4, 5, 71])
@pytest.mark.parametrize("max_rows", [1, 256, 600, BUCKETS[-1]])
def test_every_step_can_be_padded_to_a_size_that_is_captured_first(max_rows: int, groups: int) -> None:
    needed, finer = all_shapes(max_rows, groups)

    assert needed[0].rows == max(shape.rows for shape in needed + finer) >= max_rows
    assert len(needed) < 20
    for shape in finer:
        held_by = smallest_holding(shape, needed)
        assert held_by is not None
        assert held_by.holds(shape)
        assert held_by.rows <= 4 * shape.rows
        assert smallest_holding(shape, [*needed, shape]) == shape


def test_tiles_hold_rows_of_one_session_each() -> None:
    tiles = RowTiles.of(rows_of([-1] * 5, [-1], [-1] * 2), 2)

    found = list(zip(tiles.low.tolist(), tiles.high.tolist(), tiles.of_tile.tolist(), strict=True))
    assert found == [(0, 2, 0), (2, 4, 0), (4, 5, 0), (5, 6, 1), (6, 8, 2)]
    assert tiles.row_tile().tolist() == [0, 0, 1, 1, 2, 3, 4, 4]


@pytest.mark.parametrize(
    ("parents", "trunk"),
    [
        ([-1], 1),
        ([-1, 0, 1, 2], 4),
        ([-1, -1], 0),
        ([-1, 0, 1, 1], 2),
        ([-1, 0, 1, 2, 1, 4], 2),
        ([-1, 0, 1, 2, 3, -1], 0),
        ([-1, *range(600), 600, 599], 600),
        ([-1, *[0] * 256], 1),
    ],
)
def test_a_trunk_is_what_all_later_nodes_descend_from(parents: list[int], trunk: int) -> None:
    (rows,) = rows_of(parents)

    assert trunk_of(rows) == trunk
    ancestors = rows.ancestors()
    for node in range(trunk, len(parents)):
        assert ancestors[node, :trunk].all()
    if len(parents) - trunk <= MOST_BRANCHING:
        assert branch_masks(rows, trunk, None)[:trunk].tolist() == [[0] * 8] * trunk


def test_a_rows_mask_has_its_ancestors_and_itself_from_the_trunks_end_on() -> None:
    (rows,) = rows_of([-1, 0, -1, 1, *[-1] * 36, 3])

    masks = branch_masks(rows, 0, None)

    assert masks[3].tolist() == [0b1011, 0, 0, 0, 0, 0, 0, 0]
    assert masks[40].tolist() == [0b1011, 1 << 8, 0, 0, 0, 0, 0, 0]
    (rows,) = rows_of([-1, 0, 1, 1, 3])
    assert branch_masks(rows, trunk_of(rows), None)[:, 0].tolist() == [0, 0, 0b1, 0b10, 0b110]


def test_a_window_counts_positions_not_slots() -> None:
    # A chain of four below a prefix of five, and a sibling whose slot is last.
    (rows,) = rows_of([-1, 0, 1, 2, -1], length=5)

    assert np.array_equal(branch_masks(rows, 0, 3)[:, 0], [0b1, 0b11, 0b111, 0b1110, 0b10000])


def test_a_prompts_tile_ends_with_its_last_row_and_a_trees_begins_with_its_branches_at_the_latest() -> None:
    tiles = RowTiles.of(rows_of([-1, *range(9)], [-1, 0, 0, 1], length=20), 4)
    first = np.array([20 + row for row in range(10)] + [22] * 4)

    begin, end = tiles.spans(first)

    assert tiles.upto.tolist() == [*range(21, 31), 21, 21, 21, 21]
    assert list(zip(begin.tolist(), end.tolist(), strict=True)) == [(20, 24), (24, 28), (28, 30), (21, 24)]
