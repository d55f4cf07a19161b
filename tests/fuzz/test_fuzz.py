"""Hostile inputs of every class over all fronts: none is felt by another tenant, and none leaves anything.

A minute of it belongs to what a change must pass (`make fuzz-check`); `make fuzz` sends a million inputs.
FUZZ_INPUTS and FUZZ_SECONDS bound a run, and FUZZ_SEED repeats one.
"""

import asyncio
import json
import os
import queue
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from orchestrator.front.http.connections.websocket import DRAFTS_TAG, MOST_WAITING_BYTES
from tests.fuzz import http_bodies, wire_fields
from tests.fuzz.canaries import Canaries, Seen
from tests.fuzz.front_clients import Answers, GrpcFuzzClient, HttpFuzzClient, WrongAnswer
from tests.fuzz.fuzzed_server import FuzzedServer
from tests.fuzz.socket_client import LEGAL, SocketFuzzClient, frame
from tests.in_time import in_time

pytestmark = [pytest.mark.fuzz, pytest.mark.timeout(4 * 3600)]

CORPUS = Path(__file__).parent / "corpus.jsonl"
INPUTS = int(os.environ.get("FUZZ_INPUTS", "1000000000"))
SECONDS = float(os.environ.get("FUZZ_SECONDS", "45"))
SEED = int(os.environ.get("FUZZ_SEED", "0")) or random.SystemRandom().randrange(1, 2**31)
EXAMPLES = 25
"""Examples between two looks at the server; each is up to 240 inputs."""
AHEAD = 8
"""Examples that are made while others are sent."""
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
        self._socket = SocketFuzzClient(server, self.answers)

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

    def send(self, kind: str, inputs: Iterable[Any]) -> None:
        """Sends inputs of a kind of STRATEGIES. Raises WrongAnswer."""
        senders = {
            "http": self._http.send,
            "raw": self._http.send_raw,
            "grpc": self._grpc.send,
            "socket": self._socket.send,
        }
        self.run(senders[kind](inputs))

    def look(self) -> None:
        """Checks that nobody was harmed: a legal request works, ids are right, no trace is in the log."""
        assert self.server.runs, self.server.log()[-5000:]
        log = self.server.log(since=self._logged)
        assert "Traceback (most recent" not in log, log[-5000:]
        assert not self.canaries.seen.wrong, self.canaries.seen.wrong[:3]
        before = self.answers.statuses["http 200"]
        self.send("http", [("/v1/completions", http_bodies.body("/v1/completions"))])
        assert self.answers.statuses["http 200"] == before + 1
        for stall in self.stalls():
            in_time(stall["processor_seconds"] < MOST_STALL_S, stall)
        in_time((longest := self.canaries.seen.longest_gap_s) < MOST_GAP_S, longest)

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


HOLES = {path: http_bodies.holes(path) for path in http_bodies.BODIES}
PLACES = {method: list(wire_fields.places(kind)) for method, kind in wire_fields.REQUESTS.items()}
PATHS = st.sampled_from(sorted(http_bodies.BODIES))
METHODS = st.sampled_from([wire_fields.GENERATE] * 5 + sorted(wire_fields.REQUESTS))
RAW_PIECES = (
    b"",
    b"\r\n",
    b"\0",
    b"\xff",
    b" ",
    b":",
    b"transfer-encoding: chunked\r\n",
    b"content-length: 5\r\n",
)
"""What replaces bytes of a request over HTTP, beside any bytes."""


@st.composite
def http_examples(draw: st.DrawFn) -> list[tuple[str, bytes]]:
    """Bodies of a path: some values at some places, all beside one more changed field."""
    path = draw(PATHS)
    every = HOLES[path]
    places = draw(st.lists(st.sampled_from(every), min_size=min(10, len(every)), max_size=24, unique=True))
    put = draw(st.lists(http_bodies.values(), min_size=5, max_size=10))
    beside = draw(st.none() | st.tuples(st.sampled_from(every), http_bodies.values()))
    more = [] if beside is None else [beside[0].filled(beside[1])]
    return [(path, http_bodies.body(path, *more, place.filled(value))) for place in places for value in put]


@st.composite
def grpc_examples(draw: st.DrawFn, methods: st.SearchStrategy[str] = METHODS) -> list[tuple[str, bytes]]:
    """Requests of a method: some values at some places."""
    method = draw(methods)
    every = PLACES[method]
    places = draw(st.lists(st.sampled_from(every), min_size=min(10, len(every)), max_size=24, unique=True))
    put = draw(st.lists(wire_fields.values(), min_size=5, max_size=10))
    return [(method, data) for data in wire_fields.requests(method, places, put, first=draw(st.booleans()))]


@st.composite
def raw_changes(draw: st.DrawFn) -> list[tuple[int, int, bytes]]:
    """Changes of a request: where (from the end if negative), how many bytes, and what replaces them."""
    return [
        (
            draw(st.integers(-200, 400)),
            draw(st.sampled_from((0, 1, 2, 10, 200))),
            draw(st.sampled_from(RAW_PIECES) | st.binary(max_size=8))
            * draw(st.sampled_from((1, 1, 2, 1000))),
        )
        for _ in range(draw(st.integers(1, 4)))
    ]


@st.composite
def raw_examples(draw: st.DrawFn) -> list[bytes]:
    """Requests over HTTP in which bytes were replaced, repeated, removed or put in; KEY for the key."""
    made = []
    changes = draw(st.lists(raw_changes(), min_size=4, max_size=10))
    for path in draw(st.lists(PATHS, min_size=2, max_size=4, unique=True)):
        body = http_bodies.body(path)
        length = draw(st.sampled_from((len(body), len(body) - 1, 40)))
        made += [_changed(HttpFuzzClient.head_of(path, length, "KEY") + body, each) for each in changes]
    return made


@st.composite
def socket_examples(draw: st.DrawFn) -> list[tuple[bool, bytes]]:
    """Frames of a WebSocket, and whether they are whole: requests as over gRPC, or changed bytes."""
    if draw(st.booleans()):
        requests = draw(grpc_examples(st.just(wire_fields.GENERATE)))
        return [(True, frame(data)) for _, data in requests if not _pushes_out(data)]
    kinds = draw(st.lists(st.integers(0, 15), min_size=1, max_size=4))
    frames = b"".join(frame(b"x" * draw(st.sampled_from((0, 1, 125, 126, 70_000))), kind) for kind in kinds)
    changes = draw(st.lists(raw_changes(), min_size=4, max_size=10))
    return [(False, _changed(sent, each)) for sent in (LEGAL, frames, frames + LEGAL) for each in changes]


def _pushes_out(data: bytes) -> bool:
    """Whether the request behind a message is dropped: drafts fill all the room for messages that wait."""
    return data[:1] == DRAFTS_TAG and len(data) > MOST_WAITING_BYTES // 2


def _changed(request: bytes, changes: list[tuple[int, int, bytes]]) -> bytes:
    data = bytearray(request)
    for at, length, piece in changes:
        start = min(at, len(data)) if at >= 0 else max(0, len(data) + at)
        data[start : start + length] = piece
    return bytes(data)


SHARES = {"http": 0.45, "grpc": 0.3, "raw": 0.12, "socket": 0.13}
"""Share of the inputs, and of the time, that each kind of input gets."""


STRATEGIES: dict[str, st.SearchStrategy[Any]] = {
    "http": http_examples(),
    "grpc": grpc_examples(),
    "raw": raw_examples(),
    "socket": socket_examples(),
}
"""By kind, examples of many inputs each."""


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
    made: queue.Queue[list[Any] | None] = queue.Queue(AHEAD)

    def make() -> None:
        try:
            for_examples(kind, number, [Phase.generate], made.put)
        finally:
            made.put(None)

    examples = iter(made.get, None)
    with ThreadPoolExecutor(1) as thread:
        making = thread.submit(make)
        wrong: WrongAnswer | None = None
        try:
            fuzz.send(kind, (one for example in examples for one in example))
        except WrongAnswer as error:
            wrong = error
            for _ in examples:  # the thread waits until they are taken
                pass
        making.result()
    if wrong is not None:
        for_examples(kind, number, [Phase.generate, Phase.shrink], lambda example: fuzz.send(kind, example))
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
    stalls = sorted((float(each["processor_seconds"]), str(each["where"])) for each in fuzz.stalls())
    stall, where = stalls[-1] if stalls else (0.0, "nowhere")
    grown = (fuzz.server.resident_bytes() - grown_from) >> 20
    return (
        f"{fuzz.answers.inputs} inputs in {seconds:.0f} s (FUZZ_SEED={SEED}): "
        f"{dict(sorted(fuzz.answers.statuses.items()))}; {seen.streams} canary streams, longest wait "
        f"{1000 * seen.longest_gap_s:.0f} ms and longest recent stall {1000 * stall:.0f} ms ({where}) of "
        f"the loop's processor time; grown by {grown} MiB"
    )


def corpus() -> list[dict[str, Any]]:
    """The committed cases: a piece that is repeated between two others; characters are bytes."""
    return [json.loads(line) for line in CORPUS.read_text().splitlines()]


@pytest.mark.parametrize("case", corpus(), ids=lambda case: str(case["why"]))
def test_what_was_found_once_is_refused_now(fuzz: FuzzRun, case: dict[str, Any]) -> None:
    pieces = case.get("between", "").join([case.get("piece", "")] * case.get("times", 0))
    data = f"{case.get('before', '')}{pieces}{case.get('after', '')}".encode("latin-1")
    fuzz.send(case["front"], [data] if case["front"] == "raw" else [(case["at"], data)])
    fuzz.look()


def test_every_body_of_the_description_is_fuzzed_with_every_field(fuzz: FuzzRun) -> None:
    document = fuzz.run(described(fuzz.server))
    fields = {
        path: set(fields_of(document, methods["post"]["requestBody"]))
        for path, methods in document["paths"].items()
        if "requestBody" in methods.get("post", {})
    }
    assert fields == {path: set(body.full) for path, body in http_bodies.BODIES.items()}


def fields_of(document: Any, described_body: Any) -> Any:
    """The fields of a body that the OpenAPI document describes."""
    schema = described_body["content"]["application/json"]["schema"]
    return document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]["properties"]


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
