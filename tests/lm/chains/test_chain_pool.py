"""States beside blocks: what is kept, what goes first, and where a session can go on."""

from typing import Any

import pytest
import torch

from outrider.lm.chains.pool import PLACES, ChainMemory, ChainPool
from outrider.lm.chains.table import LONG, MOST_OWED, ChainTable, Ran
from outrider.lm.kv.blocks import BLOCK
from outrider.lm.kv.pool import KVLayout
from speculative.errors import Overloaded

KiB = 1024


def pool(places: int, slots: int = 64 * BLOCK) -> ChainPool:
    layout = KVLayout(((1, 1), (1, 1)), torch.float32, torch.device("cpu"))
    return ChainPool(layout, ChainMemory(slots, places), KiB)


def state(name: int) -> Any:
    """A stand-in for a state: bookkeeping never looks inside."""
    return (name,)


def ran(table: ChainTable, rows: int, *, cut_states: bool = True) -> None:
    """What a pass of this many rows leaves; a state is named by its position."""
    table.reserve(table.length + rows)
    table.parents, table.depths = list(range(-1, rows - 1)), list(range(rows))
    ends = [*table.cuts(rows), rows] if cut_states else [rows]
    table.ran = Ran(range(100, 100 + rows), {end: state(table.length + end) for end in ends})


def test_accepting_every_row_takes_the_state_behind_them() -> None:
    table = pool(9).table()
    ran(table, 5)

    table.keep(range(5))

    assert (table.length, table.state, table.owed) == (5, state(5), [])


def test_accepting_some_rows_leaves_the_state_and_owes_the_ids() -> None:
    table = pool(9).table()
    ran(table, 3)
    table.keep(range(3))
    ran(table, 6)

    assert table.commit([0, 1]) == [-1] * 6

    assert (table.length, table.state, table.owed) == (5, state(3), [100, 101])
    ran(table, 4)
    table.keep(range(1))
    assert (table.state, table.owed) == (state(3), [100, 101, 100])


def test_dropping_the_rows_of_a_pass_changes_nothing() -> None:
    table = pool(9).table()
    ran(table, 3)
    table.keep(range(3))
    ran(table, 4)

    table.drop_nodes()

    assert (table.length, table.state, table.owed, table.ran) == (3, state(3), [], None)


def test_what_is_owed_never_grows_past_a_bound() -> None:
    table = pool(9).table()
    ran(table, 2)
    table.keep(range(2))
    for _ in range(40):
        ran(table, 3)
        table.keep(range(2))
        assert len(table.owed) <= MOST_OWED + 1
    assert len(table.owed) < 40


def test_a_long_pass_keeps_the_state_at_its_last_block_border() -> None:
    found = pool(9)
    table = found.table()
    assert table.cuts(LONG - 1) == table.cuts(LONG) == []
    assert table.cuts(LONG + 3) == [LONG]
    ran(table, LONG + 3)

    table.keep(range(LONG + 1))

    assert (table.state, table.owed) == (state(LONG), [100 + LONG])
    assert found.resumable(table.blocks) == table.blocks[: LONG // BLOCK]


def test_decoding_past_a_border_keeps_the_last_state_alone() -> None:
    found = pool(9)
    table = found.table()
    for _ in range(3 * BLOCK):
        ran(table, 1)
        table.keep([0])

    assert found.kept_states == 1
    assert found.resumable(table.blocks) == table.blocks
    assert found.resumable(table.blocks[:2]) == ()


def test_a_state_moves_to_the_cached_block_of_the_same_ids() -> None:
    found = pool(9)
    found.remember(7, state(16))
    assert found.resumable([3]) == ()

    found.same(3, 7)

    assert found.resumable([3]) == [3]
    assert found.kept_states == 1


def test_states_of_cached_prefixes_give_way_to_sessions_the_least_recently_used_first() -> None:
    found = pool(PLACES + 2)
    for block in (1, 2):
        found.remember(block, state(block))
    found.recall(1)
    found.remember(3, state(3))
    found.remember(4, state(4))
    found.remember(5, state(5))
    assert found.resumable([1]) == [1]
    found.remember(6, state(6))
    assert found.resumable([2]) == (), "there were places for five, and it was used least recently"
    table = found.table()
    assert found.kept_states == 2

    with pytest.raises(Overloaded, match="places for states"):
        found.table()
    table.close()
    table.close()
    found.table()


def test_a_block_that_is_taken_anew_has_no_state() -> None:
    found = pool(9, slots=BLOCK)
    table = found.table()
    table.reserve(1)
    block = table.blocks[0]
    found.remember(block, state(16))
    table.close()

    assert found.table().blocks == []
    again = found.take(1)

    assert again == [block]
    assert found.resumable(again) == ()


@pytest.mark.parametrize(
    ("slot_bytes", "state_bytes", "expected"),
    [
        (KiB, 0, ChainMemory(1024, 0)),
        (KiB, 8 * KiB, ChainMemory(512, 64)),
        (0, 8 * KiB, ChainMemory(42 * (100 + 512), 128)),
    ],
)
def test_memory_is_divided(slot_bytes: int, state_bytes: int, expected: ChainMemory) -> None:
    assert ChainMemory.divide(1024 * KiB, slot_bytes, state_bytes, max_length=100) == expected


def test_memory_in_use_counts_kept_states() -> None:
    found = pool(9)
    before = found.bytes()
    found.remember(1, state(1))
    assert found.bytes() == before + KiB
    assert found.most_tables == 3
