"""A request that was taken over while it was being opened never takes the session back."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from outrider.v1 import verifier_pb2
from outrider.wire.epochs import wall_clock_ms
from speculative.errors import Superseded
from tests.orchestrator.conftest import FakeVerifier, next_id


@dataclass
class LateVerifier(FakeVerifier):
    """Takes its time with Opens of the session's first request, whose prompt is [5]."""

    asked: list[verifier_pb2.OpenRequest] = field(default_factory=list)
    """All that came."""
    late: int = 0
    """The Open of the first request from which on they wait, counted from 0."""
    let: asyncio.Event = field(default_factory=asyncio.Event)

    async def Open(self, request: verifier_pb2.OpenRequest, context: Any) -> verifier_pb2.OpenResponse:
        self.asked.append(request)
        earlier = [message for message in self.asked if list(message.ids) == [5]]
        if request in earlier and len(earlier) > self.late:
            await self.let.wait()
        response: verifier_pb2.OpenResponse = await super().Open(request, context)
        return response


async def take_over(world: Any, verifier: LateVerifier) -> None:
    """Sends a later request while the earlier one's Open is late, and then lets that Open arrive."""
    await world.serve(verifier)
    front = await world.ready(await world.front([verifier.address]))
    earlier = asyncio.ensure_future(front.client.generate(ids=[5], session="mine", max_tokens=60))
    await world.until(lambda: len(verifier.asked) > verifier.late)
    later = front.client.stream(ids=[6, 7], session="mine", max_tokens=30)
    first = await anext(later)
    verifier.let.set()
    with pytest.raises(Superseded, match="a later request took over session 'mine'"):
        await earlier
    rest = [id_ async for chunk in later for id_ in chunk.ids]
    assert [*first.ids, *rest] == [next_id(position) for position in range(2, 32)]


async def test_one_whose_epoch_has_become_too_low_is_not_opened_above_the_later_request(world: Any) -> None:
    verifier = LateVerifier(per_tick=1, tick_s=0.01)
    await take_over(world, verifier)
    assert [list(message.ids) for message in verifier.asked] == [[5], [6, 7]]


async def test_the_later_request_is_above_all_that_the_earlier_one_has_sent(world: Any) -> None:
    theirs = wall_clock_ms() + 60_000 << 20
    verifier = LateVerifier(per_tick=1, tick_s=0.01, late=1, highest=theirs)
    await take_over(world, verifier)
    stale, late, later = (message.epoch for message in verifier.asked)
    assert stale < theirs < late < later
