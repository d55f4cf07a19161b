"""The block allocator against a naive model of who holds what."""

import random

import pytest

from outrider.lm.kv.blocks import BlockAllocator


def test_growth_goes_on_where_the_last_block_lies() -> None:
    blocks = BlockAllocator(32)
    first = blocks.take(3, room=8)
    assert first is not None
    assert blocks.take(2, after=first[-1]) == [first[-1] + 1, first[-1] + 2]


def test_blocks_behind_one_are_free_if_there_are_as_many_and_none_has_a_holder() -> None:
    blocks = BlockAllocator(8)
    held = blocks.take(8)
    assert held is not None
    blocks.give([3, 4, 6, 7])
    assert blocks.is_free_behind(2, 2)
    assert not blocks.is_free_behind(2, 3)
    assert blocks.is_free_behind(5, 2)
    assert not blocks.is_free_behind(5, 3)
    assert not blocks.is_free_behind(None, 1)


def test_sessions_that_begin_apart_can_both_grow() -> None:
    blocks = BlockAllocator(64)
    one, two = blocks.take(1), blocks.take(1)
    assert one is not None
    assert two is not None
    for _ in range(10):
        one += blocks.take(1, after=one[-1]) or []
        two += blocks.take(1, after=two[-1]) or []
    assert one == list(range(one[0], one[0] + 11))
    assert two == list(range(two[0], two[0] + 11))


def test_what_does_not_fit_in_one_run_is_taken_in_few() -> None:
    blocks = BlockAllocator(10)
    held = [blocks.take(1) for _ in range(10)]
    for block in held:
        assert block is not None
        if block[0] in (0, 1, 2, 6, 7):
            blocks.give(block)
    taken = blocks.take(4)
    assert taken is not None
    assert taken[:3] == [0, 1, 2]
    assert taken[3] in (6, 7)


def test_more_than_is_free_is_not_given_and_changes_nothing() -> None:
    blocks = BlockAllocator(4)
    held = blocks.take(3)
    assert held is not None
    assert blocks.take(2, after=held[-1]) is None
    blocks.check([held])


def test_a_shared_block_is_free_when_its_last_holder_gives_it_back() -> None:
    blocks = BlockAllocator(4)
    held = blocks.take(1)
    assert held is not None
    blocks.share(held)
    blocks.give(held)
    assert blocks.free == 3
    blocks.give(held)
    assert blocks.free == 4
    with pytest.raises(AssertionError, match="twice"):
        blocks.give(held)


@pytest.mark.parametrize("seed", range(5))
def test_thousands_of_edits_lose_no_block(seed: int) -> None:
    dice = random.Random(seed)
    blocks = BlockAllocator(8)
    holders: list[list[int]] = []
    for _ in range(3000):
        match dice.randrange(5):
            case 0 if holders:
                blocks.give(holders.pop(dice.randrange(len(holders))))
            case 1 if holders:
                shared = dice.choice(holders)[: dice.randrange(1, 4)]
                blocks.share(shared)
                holders.append(list(shared))
            case 2 if blocks.capacity < 64:
                blocks.grow(blocks.capacity + dice.randrange(1, 4))
            case 3 if holders:
                grown = dice.choice(holders)
                grown += blocks.take(dice.randrange(1, 3), after=grown[-1]) or []
            case _:
                count = dice.randrange(1, 6)
                taken = blocks.take(count, room=dice.randrange(8))
                assert (taken is None) == (count > blocks.free and taken is None)
                holders += [taken] if taken else []
        blocks.check(holders)
