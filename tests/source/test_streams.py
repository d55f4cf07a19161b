"""What waits for one stream: coalesced, bounded, never in the worker's way."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from outrider.source.events import Event, Outgoing
from outrider.source.messages import outgoing_to_wire
from outrider.source.streams import (
    MOST_DRAFTS,
    MOST_PENDING,
    MOST_REFUSALS,
    PENDING_PAUSE_S,
    AttachStreams,
    DraftOutbox,
)
from outrider.v1 import draft_source_pb2
from speculative.errors import Unavailable
from speculative.fragment import Fragment


def fragment(base: int) -> Fragment:
    return Fragment(1, 7, base, 0, (4, 5), (-1, -1), (0.5, 0.5))


def drafts(*bases: int) -> Outgoing:
    return Outgoing([(1, fragment(base)) for base in bases])


async def test_passes_that_were_not_sent_yet_become_one_message() -> None:
    outbox = DraftOutbox()
    outbox.put(drafts(1))
    outbox.put(drafts(2, 3))
    outbox.put(Outgoing(refusals=[(2, "no")]))
    taken = await outbox.take()
    assert taken == Outgoing(drafts(1, 2, 3).drafts, [(2, "no")])


async def test_a_reader_waits_until_there_is_something() -> None:
    outbox = DraftOutbox()
    reader = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    assert not reader.done()
    outbox.put(drafts(1))
    assert await reader == drafts(1)


@pytest.mark.parametrize(("puts", "kept", "dropped"), [(2, [1, 2], 0), (3, [2, 3], 2), (5, [4, 5], 6)])
async def test_the_oldest_drafts_go_when_nobody_reads(puts: int, kept: list[int], dropped: int) -> None:
    outbox = DraftOutbox(most_drafts=2)
    assert sum(outbox.put(drafts(base)) for base in range(1, puts + 1)) == dropped
    assert await outbox.take() == drafts(*kept)


async def test_one_pass_may_be_more_than_there_is_room_for() -> None:
    outbox = DraftOutbox(most_drafts=2)
    assert outbox.put(drafts(1, 2, 3)) == 2
    assert await outbox.take() == drafts(2, 3)


async def test_a_closed_outbox_ends_its_reader() -> None:
    outbox = DraftOutbox()
    reader = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    outbox.close()
    assert await reader is None


async def test_many_refusals_go_out_in_several_messages_below_the_largest() -> None:
    outbox = DraftOutbox()
    ids = (1 << 20,) * 255
    large = Fragment(1, 1 << 60, 1 << 20, 1 << 60, ids, (-1,) * len(ids), (0.5,) * len(ids))
    outbox.put(Outgoing([(1 << 20, large)] * MOST_DRAFTS, [(n, "r" * 500) for n in range(MOST_REFUSALS)]))
    sizes, aliases = [], list[int]()
    while len(aliases) < MOST_REFUSALS:
        taken = await outbox.take()
        assert taken is not None
        sizes.append(outgoing_to_wire(taken).ByteSize())
        aliases += [alias for alias, _ in taken.refusals]
    assert aliases == list(range(MOST_REFUSALS))
    assert max(sizes) < 2**20


ENDS = 1_000


class Verifier:
    """A verifier's end of Attach that always has one more message; `sent` counts those that were read."""

    def __init__(self) -> None:
        self.sent = 0

    async def __aiter__(self) -> AsyncIterator[draft_source_pb2.AttachRequest]:
        while True:
            self.sent += 1
            yield draft_source_pb2.AttachRequest(end=range(1, ENDS + 1))

    def peer(self) -> str:
        return "verifier"


async def until_reading_pauses(verifier: Verifier) -> int:
    """How many messages were read when no more are for a while."""
    before = -1
    async with asyncio.timeout(60):
        while before != verifier.sent:
            before = verifier.sent
            await asyncio.sleep(20 * PENDING_PAUSE_S)
    return before


async def test_a_verifier_is_not_read_while_the_worker_is_behind() -> None:
    events: list[Event] = []
    verifier: Any = Verifier()
    serving = AttachStreams(lambda dropped: None).attach(
        verifier,
        verifier,
        events.append,
        pending=lambda: len(events),
        model="m",
        tokenizer_digest="",
        max_length=100,
    )
    responding = asyncio.create_task(anext(serving))
    try:
        read = await until_reading_pauses(verifier)
        assert MOST_PENDING < len(events) <= MOST_PENDING + ENDS + 1, "one message more than may wait"
        assert read == len(events) // (ENDS + 1)
        del events[:]
        assert await until_reading_pauses(verifier) == 2 * read, "reading goes on once the worker is even"
        assert len(events) <= MOST_PENDING + ENDS + 1
    finally:
        responding.cancel()
        await asyncio.gather(responding, return_exceptions=True)
        await serving.aclose()


class SlowToEnd(Verifier):
    """A verifier's end whose reading, once it is cancelled, takes until it is cancelled again."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting, self.ending = asyncio.Event(), asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[draft_source_pb2.AttachRequest]:
        yield draft_source_pb2.AttachRequest()
        try:
            self.waiting.set()
            await asyncio.Event().wait()
        finally:
            self.ending.set()
            await asyncio.Event().wait()


class Waiting(Verifier):
    """A verifier's end that has nothing to say yet."""

    async def __aiter__(self) -> AsyncIterator[draft_source_pb2.AttachRequest]:
        await asyncio.Event().wait()
        yield draft_source_pb2.AttachRequest()


async def test_a_verifier_that_dials_again_while_a_source_stops_is_sent_away() -> None:
    verifier: Any = Waiting()
    streams, events = AttachStreams(lambda dropped: None), list[Event]()
    streams.close()
    serving = streams.attach(
        verifier,
        verifier,
        events.append,
        pending=lambda: 0,
        model="m",
        tokenizer_digest="",
        max_length=100,
    )
    async with asyncio.timeout(60):
        with pytest.raises(Unavailable, match="stopping"):
            await anext(serving)
    assert events == []


async def test_a_stream_that_is_cancelled_while_it_ends_stays_cancelled() -> None:
    verifier: Any = SlowToEnd()
    streams = AttachStreams(lambda dropped: None)
    serving = streams.attach(
        verifier,
        verifier,
        lambda event: None,
        pending=lambda: 0,
        model="m",
        tokenizer_digest="",
        max_length=100,
    )
    responding = asyncio.create_task(anext(serving, None))
    async with asyncio.timeout(60):
        await verifier.waiting.wait()
        streams.close()
        await verifier.ending.wait()
        responding.cancel()
        await asyncio.wait((responding,))
    assert responding.cancelled()
