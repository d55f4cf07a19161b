"""The simulated network carries gRPC's calls as the real one may: streams in order, calls lost or twice."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import grpc.aio
import pytest

from benchmarks.simulation.calls import Channel, Server
from benchmarks.simulation.clock import Process, VirtualLoop
from benchmarks.simulation.network import AMONG_SEVERAL_S, CLIENT_PING_S, Network, Weather
from outrider.v1 import common_pb2, verifier_pb2
from outrider.v1.verifier_pb2_grpc import VerifierServicer, VerifierStub, add_VerifierServicer_to_server
from outrider.wire.status import guarded, rpc_errors
from speculative.errors import StaleEpoch, Unavailable


class Echo(VerifierServicer):
    """Counts, and repeats what it hears."""

    def __init__(self) -> None:
        self.cancels: list[int] = []
        self.ended: list[str] = []
        self.heard: list[int] = []
        """On all streams."""

    @guarded
    async def Cancel(self, request: Any, context: Any) -> verifier_pb2.VerifierCancelResponse:
        self.cancels.append(request.epoch)
        if request.epoch == 7:
            raise StaleEpoch("older", 9)
        return verifier_pb2.VerifierCancelResponse(found=True)

    @guarded
    async def Watch(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        try:
            async for request in requests:
                for alias in request.drop:
                    self.heard.append(alias)
                    yield verifier_pb2.WatchResponse(beat=verifier_pb2.Beat(step=alias))
        finally:
            self.ended.append("watch")


class Scene:
    """A client and a server."""

    def __init__(
        self, weather: Weather, client: str = "orchestrator 0", server: str = "verifier 0", others: str = ""
    ) -> None:
        self.loop = VirtualLoop()
        self.network = Network(self.loop, weather, random.Random)
        self.client, self.echo = Process(self.loop, client), Echo()
        self.server = Process(self.loop, server)
        self.start()
        if others:
            Server(self.network, Process(self.loop, others), others)

    def start(self) -> None:
        listening: Any = Server(self.network, self.server, self.server.name)
        add_VerifierServicer_to_server(self.echo, listening)

    def run(self, work: Callable[[Any], Coroutine[Any, Any, Any]]) -> Any:
        """The client's doing, with a stub of the server."""

        async def all_of_it() -> Any:
            stub = self.client.run(lambda: VerifierStub(Channel(self.network, self.server.name)))
            try:
                return await self.client.spawn(work(stub))
            finally:
                self.client.kill()
                self.server.kill()
                await asyncio.sleep(30)

        try:
            return self.loop.run_until_complete(all_of_it())
        finally:
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.close()


def cancel(epoch: int) -> verifier_pb2.VerifierCancelRequest:
    return verifier_pb2.VerifierCancelRequest(key=common_pb2.SessionKey(session="s"), epoch=epoch)


def test_a_call_is_answered_and_an_error_keeps_its_meaning() -> None:
    scene = Scene(Weather())

    async def work(stub: Any) -> None:
        assert (await stub.Cancel(cancel(1), timeout=1)).found
        with pytest.raises(StaleEpoch) as raised, rpc_errors():
            await stub.Cancel(cancel(7), timeout=1)
        assert raised.value.highest == 9

    scene.run(work)


def test_calls_overtake_each_other_and_are_carried_out_twice() -> None:
    scene = Scene(Weather(late=0.5, twice=0.5))

    async def work(stub: Any) -> None:
        await asyncio.gather(*(stub.Cancel(cancel(100 + at), timeout=5) for at in range(20)))

    scene.run(work)
    assert len(scene.echo.cancels) > 20
    assert scene.echo.cancels[:20] != sorted(scene.echo.cancels[:20])


def test_a_lost_call_fails_and_may_have_been_carried_out() -> None:
    scene = Scene(Weather(lost=0.5))

    async def work(stub: Any) -> int:
        said = await asyncio.gather(
            *(stub.Cancel(cancel(at), timeout=1) for at in range(100, 140)), return_exceptions=True
        )
        assert {type(one) for one in said} == {grpc.aio.AioRpcError, verifier_pb2.VerifierCancelResponse}
        return sum(isinstance(one, grpc.aio.AioRpcError) for one in said)

    failed = scene.run(work)
    assert 40 - failed < len(scene.echo.cancels) < 40


def test_streams_of_one_connection_keep_their_order_until_it_breaks() -> None:
    scene = Scene(Weather(late=0.5))

    async def work(stub: Any) -> None:
        for alias in range(30):
            await stub.Watch().write(verifier_pb2.WatchRequest(drop=[alias]))
        await asyncio.sleep(5.0)
        for alias in range(30, 60):
            await stub.Watch().write(verifier_pb2.WatchRequest(drop=[alias]))
            scene.network.drop_connection(scene.client, scene.server)
        await asyncio.sleep(5.0)

    scene.run(work)
    assert scene.echo.heard[:30] == list(range(30))
    assert scene.echo.heard[30:] != sorted(scene.echo.heard[30:])


def test_a_stream_keeps_its_order_however_late_its_messages_are() -> None:
    scene = Scene(Weather(late=0.5))

    async def work(stub: Any) -> list[int]:
        call = stub.Watch()

        async def write() -> None:
            for alias in range(30):
                await call.write(verifier_pb2.WatchRequest(drop=[alias]))

        writing = asyncio.create_task(write())
        got = [(await anext(call)).beat.step for _ in range(30)]
        await writing
        return got

    assert scene.run(work) == list(range(30))
    assert scene.echo.ended == ["watch"]


def test_a_killed_server_is_seen_at_once_and_refuses_from_then_on() -> None:
    scene = Scene(Weather())

    async def work(stub: Any) -> None:
        call = stub.Watch()
        await call.write(verifier_pb2.WatchRequest(drop=[1]))
        await anext(call)
        scene.loop.call_later(1.0, scene.server.kill)
        with pytest.raises(Unavailable, match="reset"), rpc_errors():
            await anext(call)
        assert scene.loop.time() < 101.2
        with pytest.raises(Unavailable, match="refused"), rpc_errors():
            await stub.Cancel(cancel(1), timeout=1)

    scene.run(work)


def test_a_frozen_server_answers_once_it_wakes() -> None:
    scene = Scene(Weather())

    async def work(stub: Any) -> float:
        scene.server.freeze()
        scene.loop.call_later(0.8, scene.server.wake)
        with pytest.raises(Unavailable), rpc_errors():
            await stub.Cancel(cancel(1), timeout=0.5)
        await stub.Cancel(cancel(2), timeout=0.5)
        return scene.loop.time() - 100

    assert 0.8 < scene.run(work) < 0.9
    assert scene.echo.cancels == [1, 2]


@pytest.mark.parametrize(("others", "left_s"), [("orchestrator 1", AMONG_SEVERAL_S), ("", CLIENT_PING_S)])
@pytest.mark.parametrize("is_cut", [False, True])
def test_a_client_leaves_a_server_that_is_not_heard_of_and_soon_one_of_several(
    others: str, left_s: float, is_cut: bool
) -> None:
    scene = Scene(Weather(), "client 0", "orchestrator 0", others)

    async def work(stub: Any) -> float:
        call = stub.Watch()
        await call.write(verifier_pb2.WatchRequest(drop=[1]))
        await anext(call)
        began = scene.loop.time()
        if is_cut:
            scene.network.cut("client 0", "orchestrator 0", 60.0)
        else:
            scene.server.freeze()
            scene.network.doubt(next(iter(scene.network.streams)))
        with pytest.raises(Unavailable, match="not answered"), rpc_errors():
            await anext(call)
        left = scene.loop.time() - began
        await asyncio.sleep(0.1)
        assert not is_cut or scene.echo.ended == (["watch"] if not others else []), (
            "the server hears of it later"
        )
        return left

    assert scene.run(work) == pytest.approx(left_s, abs=0.05)


def test_what_is_sent_over_a_cut_line_arrives_when_it_is_whole_again() -> None:
    scene = Scene(Weather())

    async def work(stub: Any) -> float:
        scene.network.cut("orchestrator 0", "verifier 0", 0.6)
        assert scene.network.is_cut("verifier 0", "orchestrator 0")
        await stub.Cancel(cancel(1), timeout=2)
        return scene.loop.time() - 100

    assert 0.6 < scene.run(work) < 0.7


def test_nothing_of_a_dead_process_reaches_anybody() -> None:
    scene = Scene(Weather())

    async def work(stub: Any) -> None:
        channel = scene.server.run(lambda: VerifierStub(Channel(scene.network, "verifier 0")))
        scene.server.kill()
        with pytest.raises(Unavailable), rpc_errors():
            await channel.Cancel(cancel(1), timeout=1)

    scene.run(work)
    assert scene.echo.cancels == []
