"""A request that waits for its turn is on record, so that a Cancel finds it through another orchestrator."""

import asyncio
from typing import Any

from orchestrator.relay.opening_turns import AT_ONCE
from speculative.stop import FinishReason
from tests.orchestrator.conftest import FakeVerifier, next_id
from tests.orchestrator.fronts import soon
from tests.redis_server import RedisServer


async def test_a_cancel_ends_it_and_its_session_s_next_request_is_answered(
    world: Any, redis_server: RedisServer
) -> None:
    verifier = FakeVerifier(per_tick=0)
    await world.serve(verifier)
    front, other = [
        await world.ready(await world.front([verifier.address], store="redis", redis_url=redis_server.url))
        for _ in range(2)
    ]

    def ask(tenant: str, session: str) -> asyncio.Future[Any]:
        request = front.client.generate(ids=[5], tenant=tenant, session=session, max_tokens=4)
        return asyncio.ensure_future(request)

    asked = {"quiet": ask("quiet", "quiet")}
    await world.until(lambda: len(verifier.opened) == 1)
    asked |= {name: ask("burst", name) for name in map(str, range(AT_ONCE + 2))}
    await world.until(lambda: len(verifier.opened) == 1 + AT_ONCE)
    waiting = max(asked.keys() - {it.key.session for it in verifier.opened})

    async def cancelled() -> bool:
        return bool(await other.client.cancel(waiting, tenant="burst"))

    async with asyncio.timeout(30):
        await soon(cancelled)  # the record is written soon
        assert not await cancelled()
        assert (await asked.pop(waiting)).finish_reason is FinishReason.CANCELLED
    verifier.per_tick = 2
    again = ask("burst", waiting)
    for answer in (again, *asked.values()):
        assert list((await answer).ids) == [next_id(position) for position in range(1, 5)]
