"""Real orchestrators are killed or frozen amid requests, and two continue one: clients get the same ids."""

import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
import redis

from outrider.client import Client
from outrider.client.options import build_request
from outrider.runtime.children import ServiceProcess
from outrider.v1 import generation_pb2
from outrider.v1.generation_pb2_grpc import GenerationStub
from outrider.wire.channel import open_sync_channel
from outrider.wire.status import rpc_errors
from speculative.errors import Superseded
from tests.in_time import in_time
from tests.integration.live import sample, until
from tests.integration.services import Services
from tests.integration.together import ASKED, ids_of, together
from tests.redis_server import RedisServer

ENDED, UP = "outrider_request_success_total", "outrider_orchestrator_peer_up"
QUERIES, HITS = "outrider_prefix_cache_queries_total", "outrider_prefix_cache_hits_total"
ONE: dict[str, Any] = {
    "ids": [5, 9, 30, 41],
    "max_tokens": 240,
    "temperature": 0.8,
    "seed": 11,
    "ignore_eos": True,
    "session": "mine",
}


@pytest.fixture
def services(tiny_llama: Path, tiny_llama_b: Path) -> Iterator[Services]:
    with closing(Services(tiny_llama, tiny_llama_b)) as services:
        yield services


@pytest.fixture
def store() -> Iterator[RedisServer]:
    with tempfile.TemporaryDirectory(prefix="redis-") as folder:
        server = RedisServer(Path(folder))
        server.start()
        yield server
        server.kill()


def recorded(store: RedisServer, what: str) -> bool:
    with redis.Redis.from_url(store.url) as looking:
        return bool(looking.keys(f"outrider:*:{what}*"))


def at_all(fronts: list[ServiceProcess]) -> str:
    """Waits until every orchestrator serves; returns their addresses, separated by commas."""
    for front in fronts:
        with Client(front.address) as client:
            until(lambda client=client: client.models())
    return ",".join(front.address for front in fronts)


def reaching(workers: list[ServiceProcess], fronts: list[ServiceProcess]) -> str:
    """`at_all`, once every orchestrator reaches every one of these workers: it serves from the first on."""
    until(lambda: all(sample(front.metrics, UP, peer=one.address) for front in fronts for one in workers))
    return at_all(fronts)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM], ids=lambda how: how.name)
def test_streams_go_on_through_the_other_orchestrator(services: Services, how: signal.Signals) -> None:
    verifier, drafter = services.verifier(), services.drafter()
    fronts = [services.orchestrator([verifier], drafter=drafter) for _ in range(2)]
    with Client(at_all(fronts)) as client:
        whole = ids_of(together(client))
        in_time(not sample(fronts[1].metrics, ENDED), "the client took the first one for frozen")
        both = threading.Barrier(len(ASKED) + 1, action=lambda: os.kill(fronts[0].pid, how))
        answers = together(client, both)
    assert ids_of(answers) == whole
    assert all(answer.finish_reason == "length" for answer in answers)
    went_on = sample(fronts[1].metrics, ENDED, finished_reason="length") > 0
    in_time(went_on or how is signal.SIGTERM, "the streams were over before")


@pytest.mark.slow
def test_a_frozen_orchestrator_is_left_within_a_second_or_so(services: Services) -> None:
    """gRPC by itself takes a minute to notice."""
    verifier = services.verifier()
    fronts = [services.orchestrator([verifier]) for _ in range(2)]
    with Client(at_all(fronts)) as client, client.stream(**ONE) as stream:
        next(stream)
        os.kill(fronts[0].pid, signal.SIGSTOP)
        began = time.monotonic()
        ids = stream.completion().ids
        took_s = time.monotonic() - began
        assert ids == client.generate(**ONE).ids
        in_time(took_s < 5)


class Raw:
    """One stream as messages of the wire, and all ids that its client has."""

    def __init__(self, channel: grpc.Channel, request: generation_pb2.GenerateRequest) -> None:
        self.ids = [id_ for have in request.start.have for id_ in have.ids]
        self.epoch = 0
        self._prompt = len(request.start.ids.ids)
        self._call = GenerationStub(channel).Generate(iter((request,)), timeout=100)

    def read(self, least: int = 10_000) -> tuple[int, ...]:
        """Reads until the client has `least` ids, or the stream ends. Raises OutriderError."""
        with rpc_errors():
            while len(self.ids) < least:
                response = next(self._call, None)
                if response is None:
                    break
                self.epoch = max(self.epoch, response.started.epoch, response.tokens.epoch)
                if response.tokens.ids:
                    assert response.tokens.position == self._prompt + len(self.ids)
                    self.ids += response.tokens.ids
        return tuple(self.ids)


@contextmanager
def crowd(fronts: list[ServiceProcess], streams: int = 6) -> Iterator[None]:
    """Other sessions that slow the verifiers down inside the block: eight choices a stream."""
    over = threading.Event()

    def keep_on(client: Client, at: int) -> None:
        while not over.is_set():
            client.generate(**ONE | {"session": f"beside {at}", "n": 8})

    with Client(at_all(fronts)) as client, ThreadPoolExecutor(streams) as pool:
        going = [pool.submit(keep_on, client, at) for at in range(streams)]
        try:
            yield
        finally:
            over.set()
        for one in going:
            one.result()


@pytest.mark.slow
def test_of_two_that_go_on_with_one_session_at_once_one_wins(services: Services, store: RedisServer) -> None:
    verifiers = [services.verifier() for _ in range(2)]
    how = ("--store", "redis", "--redis-url", store.url)
    fronts = [services.orchestrator(verifiers, *how), services.orchestrator(verifiers[::-1], *how)]
    with Client(at_all(fronts)) as client:
        whole = client.generate(**ONE | {"session": "other"}).ids
    request = build_request(None, ONE)
    with (
        # Alone, the session is over in a fifth of a second, which is how long both take to be opened.
        crowd(fronts),
        open_sync_channel(fronts[0].address) as one,
        open_sync_channel(fronts[1].address) as other,
    ):
        first = Raw(one, request)
        have = first.read(3)
        until(lambda: recorded(store, "record"))
        again = generation_pb2.GenerateRequest()
        again.CopyFrom(request)
        again.start.have.add(ids=have)
        again.start.seen_epoch = first.epoch
        ready = threading.Barrier(2)

        def go_on(channel: grpc.Channel) -> tuple[int, ...] | Superseded:
            ready.wait(60)
            try:
                return Raw(channel, again).read()
            except Superseded as lost:
                return lost

        with ThreadPoolExecutor(2) as pool:
            ends = list(pool.map(go_on, (one, other)))
        won = [end for end in ends if not isinstance(end, Superseded)]
        assert set(won) == {whole}
        in_time(len(won) == 1, "one was over before the other began")
        with suppress(Superseded):
            in_time(first.read() != whole, "the first was over before")
            raise AssertionError(f"the first went on beside the others: {first.ids}")


@pytest.mark.slow
@pytest.mark.parametrize("harm", ["kill", "freeze"])
def test_streams_do_not_notice_what_becomes_of_their_store(
    services: Services, store: RedisServer, harm: str
) -> None:
    verifiers, drafter = [services.verifier() for _ in range(2)], services.drafter()
    how = ("--store", "redis", "--redis-url", store.url)
    fronts = [services.orchestrator(verifiers, *how, drafter=drafter) for _ in range(2)]
    with Client(at_all(fronts)) as client:
        whole = ids_of(together(client))
        both = threading.Barrier(len(ASKED) + 1, action=getattr(store, harm))
        answers = together(client, both)
        assert ids_of(answers) == whole
        in_time(not any(answer.usage.recoveries for answer in answers), "a verifier was taken for dead")
        both = threading.Barrier(len(ASKED) + 1, action=lambda: os.kill(fronts[0].pid, signal.SIGKILL))
        assert ids_of(together(client, both)) == whole, "without a store a client goes on elsewhere too"
        store.thaw() if harm == "freeze" else store.start()
        client.generate(**ONE)
        until(lambda: recorded(store, "handle"))


@pytest.mark.slow
def test_a_conversation_finds_its_kv_again_after_all_orchestrators_were_lost(
    services: Services, store: RedisServer
) -> None:
    verifiers = [services.verifier() for _ in range(2)]
    how = ("--store", "redis", "--redis-url", store.url)
    ids = list(range(5, 55))
    turn: dict[str, Any] = {"session": "talk", "temperature": 0.0, "ignore_eos": True, "max_tokens": 40}
    # An idle orchestrator uses the verifier named first: the order decides where a lost conversation goes.
    fronts = [services.orchestrator(verifiers[::-1], *how) for _ in range(2)]
    with Client(reaching(verifiers, fronts)) as client:
        ids += [*client.generate(**turn, ids=ids).ids, 7, 8, 9]
    until(lambda: recorded(store, "handle"))
    for front in fronts:
        os.kill(front.pid, signal.SIGKILL)
        front.stop(5.0)
    fronts = [services.orchestrator(verifiers, *how, address=front.address) for front in fronts]
    asked = sample(verifiers[1].metrics, QUERIES)
    with Client(reaching(verifiers, fronts[::-1])) as client:
        answer = client.generate(**turn, ids=ids)
        assert not sample(verifiers[0].metrics, QUERIES)
        assert sample(verifiers[1].metrics, QUERIES) - asked == len(ids)
        assert sample(verifiers[1].metrics, HITS) >= 80, "all full blocks of the first turn"
        assert answer.ids == client.generate(**turn | {"session": "fresh"}, ids=ids).ids
