"""The slot pool: contents survive growth, limits are kept, memory comes back."""

import random

import pytest
import torch

from outrider.lm.pool import BLOCK, KVLayout, SlotPool, SlotRange
from speculative.errors import Overloaded

# Two shapes: keys and values of different widths, as latent attention has them.
LAYOUT = KVLayout(((2, 4), (2, 6), (2, 4), (2, 6)), torch.float32, torch.device("cpu"))


def write(pool: SlotPool, slots: SlotRange, count: int, mark: int) -> None:
    with torch.inference_mode():
        for plane, view in enumerate(pool.views(slots.start, slots.start + count)):
            view.copy_(contents(view, plane, count, mark))


def contents(view: torch.Tensor, plane: int, count: int, mark: int) -> torch.Tensor:
    return (mark * 1000 + plane * 100 + torch.arange(count).float())[None, None, :, None].expand_as(view)


def holds(pool: SlotPool, slots: SlotRange, count: int, mark: int) -> bool:
    views = pool.views(slots.start, slots.start + count)
    return all(torch.equal(view, contents(view, plane, count, mark)) for plane, view in enumerate(views))


def test_ranges_keep_their_contents_while_the_pool_grows_and_others_come_and_go() -> None:
    pool = SlotPool(LAYOUT, max_slots=64 * BLOCK, initial_slots=2 * BLOCK)
    dice = random.Random(0)
    live: list[tuple[SlotRange, int, int]] = []
    for mark in range(150):
        if len(live) == 14 or (live and dice.random() < 0.3):
            pool.close(live.pop(dice.randrange(len(live)))[0])
        elif live and dice.random() < 0.5:
            slots, count, old = live.pop(dice.randrange(len(live)))
            longer = min(count + dice.randrange(1, 90), 4 * BLOCK)
            pool.reserve(slots, longer)
            assert holds(pool, slots, count, old)
            write(pool, slots, longer, mark)
            live.append((slots, longer, mark))
        else:
            slots = pool.open()
            count = dice.randrange(1, 90)
            pool.reserve(slots, count)
            write(pool, slots, count, mark)
            live.append((slots, count, mark))
        pool.check_integrity()
        assert all(holds(pool, *each) for each in live)


def test_thousands_of_sessions_leave_nothing_behind() -> None:
    pool = SlotPool(LAYOUT, max_slots=32 * BLOCK)
    dice = random.Random(1)
    live: list[SlotRange] = []
    peak = 0
    for _ in range(3000):
        slots = pool.open()
        try:
            pool.reserve(slots, dice.randrange(1, 6 * BLOCK))
            live.append(slots)
        except Overloaded:
            pool.close(slots)
        while len(live) > dice.randrange(12):
            pool.close(live.pop(dice.randrange(len(live))))
        peak = max(peak, pool.bytes())
    for slots in live:
        pool.close(slots)

    pool.check_integrity()
    assert pool.used_slots == 0
    assert pool.free_slots == 32 * BLOCK
    assert peak <= 32 * BLOCK * LAYOUT.slot_bytes


def test_too_much_is_refused_with_the_numbers_and_changes_nothing() -> None:
    pool = SlotPool(LAYOUT, max_slots=3 * BLOCK)
    first, second = pool.open(), pool.open()
    pool.reserve(first, 2 * BLOCK)
    write(pool, first, 2 * BLOCK, 1)

    with pytest.raises(Overloaded, match=f"{2 * BLOCK} KV slots; {BLOCK} of {3 * BLOCK} are free"):
        pool.reserve(second, 2 * BLOCK)

    assert second.size == 0
    assert holds(pool, first, 2 * BLOCK, 1)
    pool.check_integrity()


def test_free_slots_in_pieces_are_joined_when_a_long_range_needs_them() -> None:
    pool = SlotPool(LAYOUT, max_slots=4 * BLOCK, initial_slots=4 * BLOCK)
    four = [pool.open() for _ in range(4)]
    for mark, slots in enumerate(four):
        pool.reserve(slots, BLOCK)
        write(pool, slots, BLOCK, mark)
    pool.close(four[0])
    pool.close(four[2])

    pool.reserve(four[1], 3 * BLOCK)

    assert holds(pool, four[1], BLOCK, 1)
    assert holds(pool, four[3], BLOCK, 3)
    pool.check_integrity()


def test_a_pool_smaller_than_a_block_still_serves_what_fits() -> None:
    pool = SlotPool(LAYOUT, max_slots=10)
    slots = pool.open()

    pool.reserve(slots, 10)

    assert slots.size == 10


def test_closing_twice_gives_back_once() -> None:
    pool = SlotPool(LAYOUT, max_slots=BLOCK)
    slots = pool.open()
    pool.reserve(slots, 1)
    pool.close(slots)
    pool.close(slots)

    pool.check_integrity()
    assert pool.used_slots == 0


def test_bytes_are_those_of_all_layers() -> None:
    pool = SlotPool(LAYOUT, max_slots=BLOCK)

    assert pool.bytes() == BLOCK * 2 * (2 * 4 + 2 * 6) * 4
