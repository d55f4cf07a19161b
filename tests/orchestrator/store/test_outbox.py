"""What is written to a store that fails, forgets and repeats: in the end, all that clients have."""

import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.store import STALE, Handle, SessionRecord
from orchestrator.store.memory import MemoryStore
from orchestrator.store.outbox import MOST_AT_ONCE, MOST_IDS, MOST_LEFT, StoreOutbox, WriteBatch
from orchestrator.store.prefixes import BLOCK, begins_with, hashes, lengths
from outrider.wire.codec import SessionKey
from speculative.hashing import prefix_hash

KEY = SessionKey("", "mine")
RECORD = SessionRecord(KEY, 7, "a:1")


async def write(outbox: StoreOutbox, store: MemoryStore) -> WriteBatch:
    batch = outbox.take()
    outbox.wrote(batch, await store.put(batch.puts), await store.append(batch.appends))
    return batch


async def write_all(outbox: StoreOutbox, store: MemoryStore) -> int:
    batches = 0
    while outbox:
        await write(outbox, store)
        batches += 1
        assert batches < 1000
    return batches


async def test_many_changes_are_one_append() -> None:
    outbox, store, ids = StoreOutbox(), MemoryStore(), [1]
    outbox.opened(RECORD, RECORD.epoch, {0: ids})
    for id_ in range(100):
        ids.append(id_)
        outbox.grew(KEY)
    batch = await write(outbox, store)
    assert [(it.start, len(it.ids)) for it in batch.appends] == [(0, 101)]
    assert not outbox
    ids.append(9)
    outbox.grew(KEY)
    batch = await write(outbox, store)
    assert [(it.start, it.ids) for it in batch.appends] == [(101, (9,))]
    assert not batch.puts


async def test_long_answers_are_told_in_pieces() -> None:
    outbox, store, ids = StoreOutbox(), MemoryStore(), list(range(2 * MOST_IDS + 1))
    outbox.opened(RECORD, RECORD.epoch, {0: ids})
    assert await write_all(outbox, store) == 3
    tokens = await store.tokens(KEY)
    assert tokens is not None
    assert list(tokens.ids) == ids


async def test_many_sessions_are_told_in_several_batches() -> None:
    outbox, store = StoreOutbox(), MemoryStore()
    for place in range(3 * MOST_AT_ONCE):
        outbox.opened(RECORD._replace(key=SessionKey("", f"s{place}")), RECORD.epoch, {0: [place]})
    first = outbox.take()
    assert len(first.puts) + len(first.appends) <= MOST_AT_ONCE + 1
    outbox.put_back(first)
    await write_all(outbox, store)
    for place in range(3 * MOST_AT_ONCE):
        assert await store.tokens(SessionKey("", f"s{place}")) == (7, (place,))


async def test_a_store_that_lost_everything_is_told_everything() -> None:
    outbox, ids = StoreOutbox(), [1, 2, 3]
    outbox.opened(RECORD, RECORD.epoch, {0: ids})
    await write_all(outbox, MemoryStore())
    empty = MemoryStore()
    ids.append(4)
    outbox.grew(KEY)
    await write_all(outbox, empty)
    assert await empty.tokens(KEY) == (7, (1, 2, 3, 4))
    assert await empty.find(KEY) == RECORD, "a shorter record of ids says that the other is lost as well"


async def test_a_session_that_others_have_is_left_to_them() -> None:
    outbox, store = StoreOutbox(), MemoryStore()
    await store.put([(RECORD._replace(epoch=8), 8)])
    outbox.opened(RECORD, RECORD.epoch, {0: [1]})
    await write_all(outbox, store)
    assert outbox.get(KEY) is None
    assert len(outbox) == 0


def test_ids_that_somebody_else_recorded_are_not_offered_again_and_again() -> None:
    outbox, ids = StoreOutbox(), [1]
    outbox.opened(RECORD, RECORD.epoch, {0: ids})
    batch = outbox.take()
    outbox.wrote(batch, [True], [STALE])
    ids.append(2)
    outbox.grew(KEY)
    assert not outbox.take().appends


async def test_what_ends_is_told_with_all_its_ids() -> None:
    outbox = StoreOutbox()
    outbox.opened(RECORD, RECORD.epoch, {0: [3, 4]})
    outbox.ended(KEY, 6, "scope", [1, 2])
    assert len(outbox) == 1, "that was another epoch"
    outbox.ended(KEY, 7, "scope", [1, 2])
    (ending,) = outbox.take().endings
    assert ending.ids == (1, 2, 3, 4)
    assert len(outbox) == 0


def test_what_could_not_be_opened_is_told_without() -> None:
    outbox = StoreOutbox()
    outbox.opened(RECORD, RECORD.epoch, {0: []})
    outbox.ended(KEY, 7, "scope", ())
    assert outbox.take().endings[0].ids == ()


def test_endings_that_nobody_takes_are_bounded() -> None:
    outbox = StoreOutbox()
    for place in range(MOST_LEFT + 10):
        key = SessionKey("", f"s{place}")
        outbox.opened(RECORD._replace(key=key), RECORD.epoch, {0: [1]})
        outbox.ended(key, 7, "scope", [1])
    assert outbox.dropped == 10


async def test_a_session_that_is_let_go_is_told_of_once_more() -> None:
    outbox, store = StoreOutbox(), MemoryStore()
    outbox.opened(RECORD, RECORD.epoch, {0: [1, 2]})
    outbox.left(KEY, 7)
    await write_all(outbox, store)
    assert await store.tokens(KEY) == (7, (1, 2))
    assert len(outbox) == 0


def test_sessions_let_go_that_nobody_takes_are_bounded() -> None:
    outbox = StoreOutbox()
    for place in range(MOST_LEFT + 10):
        key = SessionKey("", f"s{place}")
        outbox.opened(RECORD._replace(key=key), RECORD.epoch, {0: [1]})
        outbox.left(key, 7)
    assert (len(outbox), outbox.dropped) == (MOST_LEFT, 10)


async def test_a_cancel_is_told_again_to_a_store_that_lost_it() -> None:
    outbox = StoreOutbox()
    outbox.opened(RECORD, RECORD.epoch, {0: [1]})
    await write_all(outbox, MemoryStore())
    outbox.cancelled(KEY)
    outbox.repeat_all()
    empty = MemoryStore()
    await write_all(outbox, empty)
    assert await empty.find(KEY) == RECORD._replace(cancelled=True)


@given(st.integers(0, 2**32), st.integers(1, 40))
def test_whatever_fails_the_store_has_all_in_the_end(seed: int, steps: int) -> None:
    draw = random.Random(seed)

    async def run() -> None:
        outbox, store = StoreOutbox(), MemoryStore()
        ids: dict[int, list[int]] = {0: [], 1: []}
        record = RECORD._replace(choices=2)
        outbox.opened(record, record.epoch, ids)
        for step in range(steps):
            if draw.random() < 0.7:
                ids[draw.randrange(2)].append(step)
                outbox.grew(KEY)
            if draw.random() < 0.2:
                store = MemoryStore()
            if draw.random() < 0.5:
                batch = outbox.take()
                if draw.random() < 0.4:  # written, or in part, and no answer came
                    await store.put(batch.puts if draw.random() < 0.5 else [])
                    await store.append(batch.appends if draw.random() < 0.5 else [])
                    outbox.put_back(batch)
                    outbox.repeat_all()
                else:
                    outbox.wrote(batch, await store.put(batch.puts), await store.append(batch.appends))
        outbox.repeat_all()
        await write_all(outbox, store)
        assert await store.find(KEY) == record
        for choice, expected in ids.items():
            tokens = await store.tokens(KEY._replace(choice=choice))
            assert (tokens.ids if tokens is not None else ()) == tuple(expected)

    asyncio.run(run())


@pytest.mark.parametrize("most", [0, 15, 16, 17, 100, 1000, 131_072])
def test_remembered_lengths_find_most_of_any_overlap(most: int) -> None:
    found = lengths(most)
    assert found == sorted(set(found), reverse=True)
    assert all(length % BLOCK == 0 and length <= most for length in found)
    if most >= BLOCK:
        assert found[0] > 7 / 8 * most - BLOCK
    assert len(found) < 130


@given(st.integers(0, 5000), st.integers(0, 5000))
def test_two_lengths_have_those_of_the_shorter_in_common(one: int, other: int) -> None:
    assert set(lengths(min(one, other))) == set(lengths(one)) & set(lengths(other))


def test_prefixes_are_named_by_the_hash_on_the_wire() -> None:
    ids = list(range(100))
    assert hashes(ids) == [prefix_hash(ids[:length]) for length in lengths(100)]
    assert hashes(ids[:15]) == []


def test_a_handle_says_nothing_of_other_ids() -> None:
    handle = Handle(KEY, 7, "a:1", 3, prefix_hash([1, 2, 3]))
    assert begins_with([1, 2, 3], handle)
    assert begins_with([1, 2, 3, 4], handle)
    assert not begins_with([1, 2], handle)
    assert not begins_with([1, 2, 4, 3], handle)
