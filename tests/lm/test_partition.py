"""How rows are dealt out to a kernel: every slot of every tile once, in as many items as there may be."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.lm.attention.metadata import SPLIT_ITEMS
from outrider.lm.attention.partition import (
    BUCKETS,
    GraphShape,
    cut,
    first_seen,
    graph_shape,
    node_masks,
    tiles_of,
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


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 5000)), min_size=1, max_size=100))
def test_items_cover_every_slot_of_every_tile_once_and_are_no_more_than_there_may_be(
    spans: list[tuple[int, int]],
) -> None:
    wanted = [(low, low + count) for low, count in spans]
    items, counts = cut(wanted)

    assert len(items) == sum(counts) <= max(len(spans), SPLIT_ITEMS)
    assert len(items) == len(spans) or len(items) <= SPLIT_ITEMS, "only few items are put together"
    for tile, (low, high) in enumerate(wanted):
        covered = [slot for at, first, last in items if at == tile for slot in range(first, last)]
        assert covered == list(range(low, high))


@pytest.mark.parametrize("bucket", BUCKETS)
def test_one_row_each_of_as_many_sessions_as_a_size_holds_makes_no_more_items_than_it_has(
    bucket: int,
) -> None:
    items, _ = cut([(0, 10_000)] * bucket)

    assert bucket <= len(items) <= GraphShape(bucket, 1).items


@pytest.mark.parametrize(
    ("trees", "groups", "rows", "tile_rows"),
    [
        ([1], 4, 1, 4),
        ([4, 4, 4], 4, 16, 4),
        ([5], 4, 8, 16),
        ([64] * 4, 4, 256, 16),
        ([1], 71, 1, 1),
        ([9], 71, 16, 1),
        ([16], 1, 16, 16),
        ([17], 1, 32, 64),
    ],
)
def test_a_shape_is_the_next_size_and_the_tile_that_its_longest_tree_fills(
    trees: list[int], groups: int, rows: int, tile_rows: int
) -> None:
    assert graph_shape(rows_of(*([-1] * count for count in trees)), groups) == GraphShape(rows, tile_rows)


def test_tiles_hold_rows_of_one_session_each() -> None:
    rows = rows_of([-1] * 5, [-1], [-1] * 2)

    assert [(tile.low, tile.high) for tile in tiles_of(rows, 2)] == [(0, 2), (2, 4), (4, 5), (5, 6), (6, 8)]


def test_a_rows_mask_has_its_ancestors_and_itself() -> None:
    (rows,) = rows_of([-1, 0, -1, 1, *[-1] * 36, 3])

    masks = node_masks(rows, None)

    assert masks[3].tolist() == [0b1011, 0, 0, 0, 0, 0, 0, 0]
    assert masks[40].tolist() == [0b1011, 1 << 8, 0, 0, 0, 0, 0, 0]


def test_a_window_counts_positions_not_slots() -> None:
    # A chain of four below a prefix of five, and a sibling whose slot is last.
    (rows,) = rows_of([-1, 0, 1, 2, -1], length=5)

    assert first_seen(rows, 3) == [3, 4, 5, 6, 3]
    assert np.array_equal(node_masks(rows, 3)[:, 0], [0b1, 0b11, 0b111, 0b1110, 0b10000])
