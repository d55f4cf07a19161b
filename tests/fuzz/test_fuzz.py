"""Hostile inputs of every class over both fronts: none is felt by another tenant, and none leaves anything.

A minute of it belongs to what a change must pass (`make fuzz-check`); `make fuzz` sends a million inputs.
FUZZ_INPUTS and FUZZ_SECONDS bound a run, and FUZZ_SEED repeats one.
"""

import asyncio
import json
import os
import queue
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.fuzz import http_bodies, wire_fields
from tests.fuzz.canaries import Canaries, Seen
from tests.fuzz.front_clients import Answers, GrpcFuzzClient, HttpFuzzClient, WrongAnswer
from tests.fuzz.fuzzed_server import FuzzedServer

pytestmark = [pytest.mark.fuzz, pytest.mark.timeout(4 * 3600)]

CORPUS = Path(__file__).parent / "corpus.jsonl"
INPUTS = int(os.environ.get("FUZZ_INPUTS", "1000000000"))
SECONDS = float(os.environ.get("FUZZ_SECONDS", "45"))
SEED = int(os.environ.get("FUZZ_SEED", "0")) or random.SystemRandom().randrange(1, 2**31)
EXAMPLES = 25
"""Examples between two looks at the server; each is up to 192 inputs."""
AHEAD = 8
"""Examples that are made while others are sent."""
RAW_AT_ONCE = 48
"""Most inputs of an example of bytes that may be no HTTP."""
MOST_STALL_S = 0.2
"""Longest stall of the server's loop, in seconds of processor time, that inputs may cause together."""
MOST_GAP_S = 2.0
"""Longest wait of a canary, in seconds of processor time of the server's loop: a blocked loop took longer."""
MOST_GROWTH = 200 << 20
"""Bytes by which the server may have grown at the end."""


class FuzzRun:
    """A fuzzed server with canaries, and what was sent to it so far."""

    def __init__(self, server: FuzzedServer, canaries: Canaries) -> None:
        self.server = server
        self.canaries = canaries
        self.answers = Answers()
        self._began, self._logged = 0.0, 0
        self._loop = asyncio.new_event_loop()
        self._http = HttpFuzzClient(server, self.answers)
        self._grpc: GrpcFuzzClient = self.run(self._open())

    def begin(self) -> None:
        """Forgets what was seen so far."""
        self._began, self._logged = time.time(), self.server.log_bytes()
        self.answers.statuses.clear()
        self.canaries.seen = Seen()

    def run(self, work: Awaitable[Any]) -> Any:
        """Runs a coroutine to its end."""
        return self._loop.run_until_complete(work)

    def close(self) -> None:
        """Closes the clients."""
        self._http.close()
        self.run(self._grpc.close())
        self._loop.close()

    def http(self, path: str, bodies: list[bytes]) -> None:
        """Sends bodies; see HttpFuzzClient."""
        self.run(self._http.send(path, bodies))

    def raw(self, inputs: list[bytes]) -> None:
        """Sends bytes to the HTTP front, with a key in place of KEY; see HttpFuzzClient."""
        key = self.server.keys["attacker"].encode()
        self.run(self._http.send_raw([data.replace(b"KEY", key) for data in inputs]))

    def grpc(self, method: str, requests: list[bytes]) -> None:
        """Makes calls; see GrpcFuzzClient."""
        self.run(self._grpc.send(method, requests))

    def look(self) -> None:
        """Checks that nobody was harmed: a legal request works, ids are right, no trace is in the log."""
        assert self.server.runs, self.server.log()[-5000:]
        log = self.server.log(since=self._logged)
        assert "Traceback (most recent" not in log, log[-5000:]
        assert not self.canaries.seen.wrong, self.canaries.seen.wrong[:3]
        assert self.canaries.seen.longest_gap_s < MOST_GAP_S
        before = self.answers.statuses["http 200"]
        self.http("/v1/completions", [http_bodies.body("/v1/completions")])
        assert self.answers.statuses["http 200"] == before + 1
        for stall in self.stalls():
            assert stall["processor_seconds"] < MOST_STALL_S, stall

    def stalls(self) -> list[dict[str, Any]]:
        """The recent stalls of the server's loop."""
        return [stall for stall in self.server.stalls() if stall["ended"] >= self._began]

    async def _open(self) -> GrpcFuzzClient:
        return GrpcFuzzClient(self.server, self.answers)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FuzzRun]:
    with FuzzedServer(tmp_path_factory.mktemp("fuzz")) as server, Canaries(server) as canaries:
        run = FuzzRun(server, canaries)
        try:
            yield run
        finally:
            run.close()


@pytest.fixture
def fuzz(running: FuzzRun) -> FuzzRun:
    """The fuzzed server, of which only what happens from now on counts."""
    running.begin()
    return running


def bodies_at(draw: st.DrawFn, path: str) -> list[bytes]:
    """Bodies of a path: some values at some places, all beside one more changed field."""
    every = HOLES[path]
    places = draw(st.lists(st.sampled_from(every), min_size=min(6, len(every)), max_size=24, unique=True))
    put = draw(st.lists(http_bodies.values(), min_size=3, max_size=8))
    beside = draw(st.none() | st.tuples(st.sampled_from(every), http_bodies.values()))
    more = [] if beside is None else [beside[0].filled(beside[1])]
    return [http_bodies.body(path, *more, place.filled(value)) for place in places for value in put]


HOLES = {path: http_bodies.holes(path) for path in http_bodies.LEGAL}
PLACES = {method: list(wire_fields.places(kind)) for method, kind in wire_fields.REQUESTS.items()}
PATHS = st.sampled_from(sorted(http_bodies.LEGAL))
METHODS = st.sampled_from([wire_fields.GENERATE] * 5 + sorted(wire_fields.REQUESTS))


@st.composite
def http_examples(draw: st.DrawFn) -> tuple[str, list[bytes]]:
    """A path and bodies for it."""
    path = draw(PATHS)
    return path, bodies_at(draw, path)


@st.composite
def grpc_examples(draw: st.DrawFn) -> tuple[str, list[bytes]]:
    """A method and requests for it: some values at some places."""
    method = draw(METHODS)
    places = draw(st.lists(st.sampled_from(PLACES[method]), min_size=4, max_size=24, unique=True))
    put = draw(st.lists(wire_fields.values(), min_size=3, max_size=8))
    return method, wire_fields.requests(method, places, put, first=draw(st.booleans()))


@st.composite
def raw_inputs(draw: st.DrawFn) -> bytes:
    """A request over HTTP in which bytes were replaced, repeated, removed or put in; KEY for the key."""
    path = draw(PATHS)
    body = http_bodies.body(path)
    length = draw(st.sampled_from((len(body), len(body) - 1, 40)))
    data = bytearray(HttpFuzzClient.head_of(path, length, "KEY") + body)
    for _ in range(draw(st.integers(1, 4))):
        at, length = draw(st.integers(0, len(data))), draw(st.sampled_from((0, 1, 2, 10, 200)))
        pieces = (
            b"",
            b"\r\n",
            b"\0",
            b"\xff",
            b" ",
            b":",
            b"transfer-encoding: chunked\r\n",
            b"content-length: 5\r\n",
        )
        data[at : at + length] = draw(st.sampled_from(pieces) | st.binary(max_size=8)) * draw(
            st.sampled_from((1, 1, 2, 1000))
        )
    return bytes(data)


SHARES = {"http": 0.5, "grpc": 0.35, "raw": 0.15}
"""Share of the inputs, and of the time, that each kind of input gets."""


STRATEGIES: dict[str, st.SearchStrategy[Any]] = {
    "http": http_examples(),
    "grpc": grpc_examples(),
    "raw": st.tuples(st.lists(raw_inputs(), min_size=1, max_size=RAW_AT_ONCE)),
}


def for_examples(kind: str, number: int, phases: Sequence[Phase], do: Callable[[Any], None]) -> None:
    """Calls `do` with EXAMPLES examples of one kind, the same ones for the same number."""

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        phases=phases,
        suppress_health_check=list(HealthCheck),
    )
    @seed(SEED + number)
    @given(STRATEGIES[kind])
    def each(example: Any) -> None:
        do(example)

    each()


def send_examples(fuzz: FuzzRun, kind: str, number: int) -> None:
    """Sends EXAMPLES examples of one kind. Raises WrongAnswer, with the smallest input that was found.

    A thread makes examples while others are sent. After a wrong answer the same examples are sent one by one.
    """
    made: queue.Queue[Any] = queue.Queue(AHEAD)

    def make() -> None:
        try:
            for_examples(kind, number, [Phase.generate], made.put)
        finally:
            made.put(None)

    send = getattr(fuzz, kind)
    with ThreadPoolExecutor(1) as thread:
        making = thread.submit(make)
        wrong: WrongAnswer | None = None
        while (example := made.get()) is not None:
            try:
                if wrong is None:
                    send(*example)
            except WrongAnswer as error:
                wrong = error
        making.result()
    if wrong is not None:
        for_examples(kind, number, [Phase.generate, Phase.shrink], lambda example: send(*example))
        raise wrong


@pytest.mark.parametrize("kind", SHARES)
def test_no_input_is_felt_by_another_tenant_or_leaves_anything(
    fuzz: FuzzRun, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    began, number = time.monotonic(), 0
    send_examples(fuzz, kind, number)
    fuzz.look()
    grown_from = fuzz.server.resident_bytes()
    while fuzz.answers.inputs < INPUTS * SHARES[kind] and time.monotonic() - began < SECONDS * SHARES[kind]:
        number += 1
        send_examples(fuzz, kind, number)
        fuzz.look()
        if number % 50 == 0:
            with capsys.disabled():
                print(f"\n{kind}: {report(fuzz, began, grown_from)}", flush=True)
    with capsys.disabled():
        print(f"\n{kind}: {report(fuzz, began, grown_from)}", flush=True)
    assert fuzz.canaries.seen.streams > 0
    assert fuzz.server.resident_bytes() - grown_from < MOST_GROWTH


def report(fuzz: FuzzRun, began: float, grown_from: int) -> str:
    """A line that says what was sent and what was seen."""
    seconds, seen = time.monotonic() - began, fuzz.canaries.seen
    stall = max((float(each["processor_seconds"]) for each in fuzz.stalls()), default=0.0)
    grown = (fuzz.server.resident_bytes() - grown_from) >> 20
    return (
        f"{fuzz.answers.inputs} inputs in {seconds:.0f} s (FUZZ_SEED={SEED}): "
        f"{dict(sorted(fuzz.answers.statuses.items()))}; {seen.streams} canary streams, longest wait "
        f"{1000 * seen.longest_gap_s:.0f} ms and longest recent stall {1000 * stall:.0f} ms of the loop's "
        f"processor time; grown by {grown} MiB"
    )


def corpus() -> list[dict[str, Any]]:
    """The committed cases: a piece that is repeated between two others; characters are bytes."""
    return [json.loads(line) for line in CORPUS.read_text().splitlines()]


@pytest.mark.parametrize("case", corpus(), ids=lambda case: str(case["why"]))
def test_what_was_found_once_is_refused_now(fuzz: FuzzRun, case: dict[str, Any]) -> None:
    pieces = case.get("between", "").join([case.get("piece", "")] * case.get("times", 0))
    data = f"{case.get('before', '')}{pieces}{case.get('after', '')}".encode("latin-1")
    if case["front"] == "raw":
        fuzz.raw([data])
    elif case["front"] == "http":
        fuzz.http(case["at"], [data])
    else:
        fuzz.grpc(case["at"], [data])
    fuzz.look()


def test_every_field_of_the_description_is_among_the_places(fuzz: FuzzRun) -> None:
    document = fuzz.run(described(fuzz.server))
    for path, full in http_bodies.FULL.items():
        body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        schema = document["components"]["schemas"][body["$ref"].rpartition("/")[2]]
        assert set(schema["properties"]) == set(full), path


async def described(server: FuzzedServer) -> Any:
    """The OpenAPI document of a front."""
    host, _, port = server.http.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"GET /openapi.json HTTP/1.0\r\nhost: x\r\nauthorization: Bearer {server.keys['canary']}\r\n\r\n"
    writer.write(head.encode())
    _, _, content = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    return json.loads(content)


def test_an_answer_that_no_input_may_get_is_noticed(fuzz: FuzzRun) -> None:
    client = HttpFuzzClient(fuzz.server, Answers())
    with pytest.raises(WrongAnswer, match="shape"):
        client._check(b"", 400, b'{"detail": "no"}')
    with pytest.raises(WrongAnswer, match="status 500"):
        client._check(b"", 500, b"")
