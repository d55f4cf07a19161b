"""A client of several orchestrators loses one and goes on at another: every id once, in order."""

import asyncio
import threading
from typing import Any

import pytest

from outrider.client import AsyncClient, Client
from speculative.errors import InvalidRequest, OutriderError, Unavailable
from speculative.stop import FinishReason
from tests.in_time import in_time

LIMIT = 60
WHOLE = tuple(2 + (position * 7) % 94 for position in range(1, LIMIT))


async def two_fronts(world: Any) -> tuple[Any, Any, Any]:
    verifier = await world.verifier(per_tick=1, tick_s=0.02)
    return (
        verifier,
        await world.ready(await world.front([verifier.address])),
        await world.ready(await world.front([verifier.address])),
    )


@pytest.mark.parametrize("n", [1, 3])
async def test_an_answer_goes_on_at_the_next_orchestrator(world: Any, n: int) -> None:
    verifier, first, second = await two_fronts(world)
    async with AsyncClient(f"{first.address}, {second.address}") as client:
        stream = client.stream(ids=[5], max_tokens=LIMIT - 1, n=n)
        seen = [(await anext(stream)) for _ in range(5)]
        await first.service.stop(0.0)
        seen += [chunk async for chunk in stream]
        completion = await stream.completion()
    assert [choice.ids for choice in completion.choices] == [WHOLE] * n
    assert completion.text == "".join(chunk.text for chunk in seen if chunk.choice == 0)
    for choice in range(n):
        assert tuple(id_ for chunk in seen if chunk.choice == choice for id_ in chunk.ids) == WHOLE
    epochs = {opened.epoch for opened in verifier.opened}
    in_time(len(epochs) == 2, "an orchestrator was taken for dead")
    assert len({opened.seed for opened in verifier.opened if opened.key.choice == 0}) == 1


async def test_the_blocking_client_goes_on_as_well(world: Any) -> None:
    _, first, second = await two_fronts(world)
    started = threading.Event()

    def ask() -> tuple[int, ...]:
        with Client(f"{first.address},{second.address}") as client:
            stream = client.stream(ids=[5], max_tokens=LIMIT - 1)
            next(stream)
            started.set()
            return stream.completion().ids

    asking = asyncio.create_task(asyncio.to_thread(ask))
    await asyncio.to_thread(started.wait, 60)
    await first.service.stop(0.0)
    assert await asking == WHOLE


async def test_an_orchestrator_that_never_was_there_is_passed_over(world: Any) -> None:
    _, front, _ = await two_fronts(world)
    async with AsyncClient(f"127.0.0.1:1,{front.address}") as client:
        assert (await client.generate(ids=[5], max_tokens=7)).ids == WHOLE[:7]
        assert [model.name for model in await client.models()] == ["toy"]


async def test_a_cancel_reaches_the_orchestrator_that_is_left(world: Any) -> None:
    verifier = await world.verifier(per_tick=1, tick_s=0.02)
    front = await world.ready(await world.front([verifier.address]))
    addresses = f"127.0.0.1:1,{front.address}"
    async with AsyncClient(addresses) as client:
        stream = client.stream(ids=[5], session="mine", max_tokens=LIMIT - 1)
        await anext(stream)
        verifier.per_tick = 0  # neither request ends by itself
        assert await client.cancel("mine")
        assert (await stream.completion()).finish_reason is FinishReason.CANCELLED
        with pytest.raises(Unavailable):  # nobody knows whether a request runs where nobody answers
            await client.cancel("another")
    blocking = Client(addresses)
    running = asyncio.create_task(front.client.generate(ids=[5], session="ours", max_tokens=LIMIT - 1))
    await world.until(lambda: len(verifier.opened) == 2)
    assert await asyncio.to_thread(blocking.cancel, "ours")
    assert (await running).finish_reason is FinishReason.CANCELLED
    with pytest.raises(Unavailable):
        await asyncio.to_thread(blocking.cancel, "another")
    blocking.close()


async def test_a_full_one_is_passed_over(world: Any) -> None:
    verifier = await world.verifier(per_tick=1, tick_s=0.02)
    full = await world.ready(await world.front([verifier.address], max_streams=1))
    other = await world.ready(await world.front([verifier.address]))
    held = full.client.stream(ids=[5], max_tokens=LIMIT - 1)
    await anext(held)
    async with AsyncClient(f"{full.address},{other.address}", patience_s=60) as client:
        assert (await client.generate(ids=[5], max_tokens=7)).ids == WHOLE[:7]


async def test_a_lone_orchestrator_that_is_lost_is_an_error_at_once(world: Any) -> None:
    _, front, _ = await two_fronts(world)
    stream = front.client.stream(ids=[5], max_tokens=LIMIT - 1)
    await anext(stream)
    await front.service.stop(0.0)
    with pytest.raises(Unavailable, match="stopping"):
        await stream.completion()


@pytest.mark.parametrize("patience_s", [0.0, 30.0])
async def test_a_reader_that_gave_up_waiting_gets_the_rest_or_an_error(world: Any, patience_s: float) -> None:
    verifier, front, _ = await two_fronts(world)
    async with AsyncClient(front.address, patience_s=patience_s) as client:
        stream = client.stream(ids=[5], max_tokens=LIMIT - 1)
        await anext(stream)
        verifier.silent = True
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await stream.completion()
        verifier.silent = False
        if patience_s:
            assert (await stream.completion()).ids == WHOLE
        else:
            with pytest.raises(Unavailable, match="broke off"):
                await anext(stream)


@pytest.mark.parametrize("closes", ["stream", "client"])
async def test_whoever_reads_a_stream_that_another_task_closes_gets_an_error(world: Any, closes: str) -> None:
    """A CancelledError would seem to be meant for the task that reads."""
    verifier, front, _ = await two_fronts(world)
    async with AsyncClient(front.address) as client:
        stream = client.stream(ids=[5], max_tokens=LIMIT - 1)
        await anext(stream)
        verifier.silent = True
        reading = asyncio.create_task(stream.completion())
        await asyncio.sleep(0.1)
        stream.close() if closes == "stream" else await client.close()
        with pytest.raises(OutriderError, match="was closed"):
            await reading
        verifier.silent = False


async def test_patience_ends(world: Any) -> None:
    async with AsyncClient("127.0.0.1:1,127.0.0.1:2", patience_s=0.3) as client:
        with pytest.raises(Unavailable):
            await client.generate(ids=[5])


async def test_what_is_wrong_is_not_asked_twice(world: Any) -> None:
    _, first, second = await two_fronts(world)
    async with AsyncClient(f"{first.address},{second.address}") as client:
        with pytest.raises(InvalidRequest, match="96"):
            await client.generate(ids=[96])
    assert second.sample("request_errors_total", reason="InvalidRequest") == 0


@pytest.mark.parametrize("address", ["", " ", "a:1,,b:2", ","])
def test_an_empty_address_is_refused(address: str) -> None:
    with pytest.raises(InvalidRequest, match="address is empty"):
        Client(address)


def test_patience_below_nothing_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="patience_s is -1"):
        Client("a:1", patience_s=-1)
