"""The slot pool and its tables: contents survive growth, limits are kept, memory comes back."""

import random

import pytest
import torch

from benchmarks.shared.process_memory import resident_bytes
from outrider.lm.kv.blocks import BLOCK
from outrider.lm.kv.pool import KVLayout, SlotPool, _Group
from outrider.lm.kv.table import SlotTable
from speculative.errors import Overloaded

# Two shapes: keys and values of different widths, as latent attention has them.
LAYOUT = KVLayout(((2, 4), (2, 6), (2, 4), (2, 6)), torch.float32, torch.device("cpu"))


def write(pool: SlotPool, table: SlotTable, low: int, high: int, mark: int) -> None:
    slots = table.slots(low, high)
    with torch.inference_mode():
        for plane, view in enumerate(pool.planes()):
            view[:, slots] = contents(view, plane, low, high, mark)


def contents(view: torch.Tensor, plane: int, low: int, high: int, mark: int) -> torch.Tensor:
    heads, _, width = view.shape
    values = mark * 1000 + plane * 100 + torch.arange(low, high).float()
    return values[None, :, None].expand(heads, high - low, width)


def holds(pool: SlotPool, table: SlotTable, count: int, mark: int) -> bool:
    seen = pool.seen(table.runs(0, count))
    planes = pool.planes()
    return all(
        torch.equal(seen[plane][0], contents(planes[plane], plane, 0, count, mark)) for plane in range(4)
    )


def test_tables_keep_their_contents_while_the_pool_grows_and_others_come_and_go() -> None:
    pool = SlotPool(LAYOUT, max_slots=64 * BLOCK, initial_slots=2 * BLOCK)
    dice = random.Random(0)
    live: list[tuple[SlotTable, int, int]] = []
    in_pieces = 0
    for mark in range(200):
        if live and (len(live) == 14 or dice.random() < 0.3):
            live.pop(dice.randrange(len(live)))[0].close()
        elif live and dice.random() < 0.5:
            table, count, old = live.pop(dice.randrange(len(live)))
            longer = min(count + dice.randrange(1, 40), 4 * BLOCK)
            table.reserve(longer)
            write(pool, table, count, longer, old)
            live.append((table, longer, old))
        else:
            table, count = SlotTable(pool), dice.randrange(1, 4 * BLOCK)
            table.reserve(count)
            write(pool, table, 0, count, mark)
            live.append((table, count, mark))
        in_pieces += any(len(table.runs(0, count)) > 1 for table, count, _ in live)
        pool.check_integrity(table.blocks for table, _, _ in live)
        assert all(holds(pool, *each) for each in live)
    assert in_pieces > 10, "some tables lay in several runs"


def test_thousands_of_sessions_leave_nothing_behind() -> None:
    pool = SlotPool(LAYOUT, max_slots=32 * BLOCK)
    dice = random.Random(1)
    live: list[SlotTable] = []
    for _ in range(3000):
        table = SlotTable(pool)
        try:
            table.reserve(dice.randrange(1, 6 * BLOCK))
            live.append(table)
        except Overloaded:
            assert not table.blocks
        while len(live) > dice.randrange(12):
            live.pop(dice.randrange(len(live))).close()
        assert pool.bytes() <= 32 * BLOCK * LAYOUT.slot_bytes
    for table in live:
        table.close()
    pool.check_integrity()
    assert pool.used_slots == 0
    assert pool.free_blocks == 32


def test_too_much_is_refused_with_the_numbers_and_changes_nothing() -> None:
    pool = SlotPool(LAYOUT, max_slots=3 * BLOCK)
    first, second = SlotTable(pool), SlotTable(pool)
    first.reserve(2 * BLOCK)
    write(pool, first, 0, 2 * BLOCK, 1)
    with pytest.raises(Overloaded, match="2 more KV blocks of 16 tokens; 1 of 3 are free"):
        second.reserve(2 * BLOCK)
    assert holds(pool, first, 2 * BLOCK, 1)
    pool.check_integrity([first.blocks])


def test_who_can_evict_is_asked_before_anything_is_refused() -> None:
    pool = SlotPool(LAYOUT, max_slots=3 * BLOCK)
    cached, table = SlotTable(pool), SlotTable(pool)
    cached.reserve(3 * BLOCK)

    def evict(blocks: int) -> int:
        cached.close()
        return 3

    pool.evict = evict
    table.reserve(2 * BLOCK)
    pool.check_integrity([table.blocks])


def test_storage_does_not_grow_for_a_session_that_goes_on_where_its_last_block_lies() -> None:
    pool = SlotPool(LAYOUT, max_slots=64 * BLOCK, initial_slots=4 * BLOCK)
    table = SlotTable(pool, room=4 * BLOCK)
    table.reserve(1)
    for count in (2, 3, 4):
        table.reserve(count * BLOCK)
        assert pool.blocks.capacity == 4
    assert len(table.runs(0, 4 * BLOCK)) == 1


def test_storage_grows_rather_than_lay_a_session_out_in_pieces() -> None:
    pool = SlotPool(LAYOUT, max_slots=64 * BLOCK, initial_slots=4 * BLOCK)
    first = SlotTable(pool)
    first.reserve(1)
    second = SlotTable(pool, room=8 * BLOCK)
    second.reserve(1)
    for count in range(1, 8 * BLOCK):
        second.reserve(count)
    assert len(second.runs(0, 8 * BLOCK - 1)) == 1


def test_an_adopted_prefix_reads_what_was_written_and_writes_elsewhere() -> None:
    pool = SlotPool(LAYOUT, max_slots=64 * BLOCK)
    table = SlotTable(pool)
    table.reserve(3 * BLOCK)
    table.length = 2 * BLOCK + 5
    write(pool, table, 0, table.length, 7)
    adopted = SlotTable(pool)
    adopted.adopt(table.blocks[:2])
    assert adopted.length == 2 * BLOCK
    assert adopted.blocks == table.blocks[:2]
    adopted.reserve(3 * BLOCK)
    assert adopted.blocks[2] != table.blocks[2]
    write(pool, adopted, adopted.length, 3 * BLOCK, 9)
    assert holds(pool, table, table.length, 7)
    assert holds(pool, adopted, adopted.length, 7)
    pool.check_integrity([table.blocks, adopted.blocks])
    table.close()
    assert holds(pool, adopted, adopted.length, 7)
    adopted.close()
    pool.check_integrity()


def test_a_copy_lies_together_and_is_nobody_elses() -> None:
    pool = SlotPool(LAYOUT, max_slots=64 * BLOCK)
    table, between = SlotTable(pool), SlotTable(pool)
    for part in range(1, 4):
        table.reserve(part * BLOCK)
        between._add(pool.take(1, table.blocks[-1]))
    table.length = 3 * BLOCK
    write(pool, table, 0, 3 * BLOCK, 7)
    copy = SlotTable(pool, room=6 * BLOCK)
    copy.copy_of(table.blocks)
    assert (len(table.runs(0, 3 * BLOCK)), len(copy.runs(0, 3 * BLOCK)), copy.length) == (3, 1, 3 * BLOCK)
    write(pool, table, 0, 3 * BLOCK, 9)
    assert holds(pool, copy, 3 * BLOCK, 7)
    pool.check_integrity([table.blocks, between.blocks, copy.blocks])


def test_a_copy_of_blocks_is_made_run_by_run_and_told_slot_by_slot() -> None:
    layout = KVLayout(LAYOUT.planes, LAYOUT.dtype, LAYOUT.device, tail=3)
    pool = SlotPool(layout, max_slots=16 * BLOCK, initial_slots=16 * BLOCK)
    told: list[tuple[int, int]] = []
    pool.copied = lambda sources, targets: told.extend(zip(sources, targets, strict=True))
    with torch.inference_mode():
        for plane, view in enumerate(pool.planes()):
            view[:] = plane + torch.arange(view.shape[1])[None, :, None]
        pool.write_tails(range(16), torch.arange(16)[:, None].expand(16, 3))
    pool.copy_blocks([1, 2, 5, 6], [8, 9, 10, 12])
    moved = [(8, 1), (9, 2), (10, 5), (12, 6)]
    assert told == [(s * BLOCK + at, t * BLOCK + at) for t, s in moved for at in range(BLOCK)]
    held = list(range(16))
    for target, source in moved:
        held[target] = source
    for plane, view in enumerate(pool.planes()):
        wanted = torch.tensor([block * BLOCK + at for block in held for at in range(BLOCK)])
        assert torch.equal(view[0, : pool.slots, 0], plane + wanted)
    assert [int(pool.tail(block)[0]) for block in range(16)] == held


def storages(pool: SlotPool) -> list[int]:
    return [plane.data_ptr() for plane in pool.planes()]


def test_a_pool_on_a_cpu_grows_without_a_copy_and_takes_no_memory_for_what_nobody_wrote() -> None:
    """A copy of what all sessions have cached would hold up each of them, the longer the more there is."""
    slots, before = 2**20, resident_bytes()
    pool = SlotPool(LAYOUT, max_slots=slots, initial_slots=BLOCK)
    first, blocks = storages(pool), pool.blocks.capacity
    while blocks < pool.max_blocks:
        blocks = min(2 * blocks, pool.max_blocks)
        pool.grow(blocks)
        assert storages(pool) == first
    assert pool.slots == slots
    assert pool.bytes() > 80 * 2**20
    assert resident_bytes() - before < pool.bytes() // 8


def test_a_pool_that_gets_no_addresses_for_its_bound_grows_by_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    allocate = SlotPool._allocate

    def refused(pool: SlotPool, group: _Group, slots: int) -> list[torch.Tensor]:
        if slots > 32 * BLOCK:
            raise RuntimeError("not enough memory")
        return allocate(pool, group, slots)

    monkeypatch.setattr(SlotPool, "_allocate", refused)
    pool = SlotPool(LAYOUT, max_slots=64 * BLOCK, initial_slots=BLOCK)
    table = SlotTable(pool)
    table.reserve(BLOCK)
    write(pool, table, 0, BLOCK, 5)
    first = storages(pool)
    table.reserve(5 * BLOCK)
    assert storages(pool) != first
    assert holds(pool, table, BLOCK, 5)


def test_closing_twice_gives_back_once() -> None:
    pool = SlotPool(LAYOUT, max_slots=BLOCK)
    table = SlotTable(pool)
    table.reserve(1)
    table.close()
    table.close()
    pool.check_integrity()


def test_bytes_are_those_of_all_layers() -> None:
    pool = SlotPool(LAYOUT, max_slots=BLOCK)
    assert pool.bytes() == BLOCK * 2 * (2 * 4 + 2 * 6) * 4
