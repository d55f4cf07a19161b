"""`bench compare` drives our front and another server with the same prompts, and leaves out one that dies."""

import asyncio
import json
import re
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.compare import __main__ as compare
from benchmarks.compare.event_stream import (
    Endpoint,
    EndpointFailed,
    StreamedAnswer,
    find_model,
    stream_answer,
)
from benchmarks.compare.flags import keys_in
from benchmarks.compare.level import drive, level_figures, level_record
from benchmarks.http.front_clients import MeasuredOrchestrator
from benchmarks.shared.envelope import module_command
from benchmarks.shared.services import HelperProcess

TOKENIZER = Path(__file__).parents[2] / "models" / "target" / "tokenizer.json"
EVENTS = 4
NOT_FOUND = b'HTTP/1.1 404 Not Found\r\n\r\n{"detail": "Not Found"}'


class SmallServer:
    """An OpenAI-compatible server that answers every request with EVENTS events, and dies on demand.

    Args:
        answers: how many requests for completions are answered; later ones break off in their stream.
    """

    def __init__(self, answers: int) -> None:
        self.left = answers
        self.bodies: list[dict[str, Any]] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            if head.startswith("GET /v1/models"):
                writer.write(
                    b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + json.dumps(self.models()).encode()
                )
            elif head.startswith("GET"):
                writer.write(NOT_FOUND)
            else:
                length = int(head.lower().partition("content-length: ")[2].partition("\r\n")[0])
                self.bodies.append(json.loads(await reader.readexactly(length)))
                await self.complete(writer)
            await writer.drain()
            await self.linger(reader)
        finally:
            writer.close()

    async def linger(self, reader: asyncio.StreamReader) -> None:
        """Waits before the connection is closed."""

    async def complete(self, writer: asyncio.StreamWriter) -> None:
        self.left -= 1
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
        for _ in range(EVENTS):
            writer.write(b'data: {"choices": [{"text": "x"}]}\n\n')
            if self.left < 0:
                return
            await asyncio.sleep(0)
        writer.write(b'data: {"choices": [], "usage": {"completion_tokens": 7}}\n\ndata: [DONE]\n\n')

    @staticmethod
    def models() -> dict[str, Any]:
        return {"data": [{"id": "small"}]}


@contextmanager
def served(server: SmallServer) -> Iterator[str]:
    """The base URL of a server in a thread of its own."""
    started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event, int]] = Future()

    async def run() -> None:
        stop = asyncio.Event()
        async with await asyncio.start_server(server.serve, "127.0.0.1", 0) as listening:
            port = listening.sockets[0].getsockname()[1]
            started.set_result((asyncio.get_running_loop(), stop, port))
            await stop.wait()

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    loop, stop, port = started.result(10)
    try:
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()


@contextmanager
def our_front() -> Iterator[str]:
    """The base URL of our orchestrator before a verifier without a model."""
    command = module_command("http.fake_verifier", str(TOKENIZER), "0.002", "2")
    with HelperProcess(command) as verifier, MeasuredOrchestrator(verifier.address, 64) as orchestrator:
        yield f"{orchestrator.http}/v1"


def test_an_answer_has_its_text_its_events_and_the_endpoints_own_count() -> None:
    with served(SmallServer(1)) as url:
        endpoint = Endpoint("small", url)
        answer = asyncio.run(stream_answer(endpoint, "/completions", {"prompt": "a"}, 10))

        assert asyncio.run(find_model(endpoint, 10)) == "small"

    assert (answer.text, len(answer.events), answer.tokens) == ("x" * EVENTS, EVENTS, 7)
    assert len(answer.gaps_ms) == EVENTS - 1


def test_a_tokens_time_is_that_of_the_answer_over_its_later_tokens() -> None:
    answer = StreamedAnswer(1.0, events=[2.0, 2.5, 3.0], text="abcdef", tokens=6)

    assert (answer.first_ms, answer.token_ms, answer.gaps_ms) == (1000, 200, [500, 500])
    assert StreamedAnswer(1.0, events=[2.0], text="a", tokens=1).token_ms == 0


def test_a_stream_that_breaks_off_is_a_failure_and_cancels_the_level() -> None:
    with served(SmallServer(2)) as url, pytest.raises(EndpointFailed, match="broke off after 1 events"):
        asyncio.run(drive(Endpoint("small", url), "/completions", [{}] * 5, 1, 10))


class Scripted(SmallServer):
    """Answers every request for completions with these bytes; one that `hangs` then says nothing more."""

    def __init__(self, said: bytes, *, hangs: bool = False) -> None:
        super().__init__(0)
        self.said, self.hangs = said, hangs

    async def complete(self, writer: asyncio.StreamWriter) -> None:
        writer.write(self.said)

    async def linger(self, reader: asyncio.StreamReader) -> None:
        if self.hangs:
            await reader.read()  # until the client leaves


OK = b"HTTP/1.1 200 OK\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
CLOSED = "^closed the connection amid an answer$"
TEXT = b'data: {"choices": [{"text": "x"}]}\n\n'


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b"HTTP/1.1 503 Busy\r\n\r\ncome back later", "503 Busy: come back later$"),
        (OK + TEXT + b'data: {"error": {"message": "out of memory"}}\n\n', "in the stream: .*out of memory"),
        (b"HTTP/1.1 503 Busy\r\n\r\n" + "é\n".encode() * 500, "503 Busy: (é ){100}$"),
        (b"HTTP/1.1 503 Busy\r\n\r\n\x1b[2Jgo", r"503 Busy: \?\[2Jgo$"),
        (b"HTTP/1.1 503 Busy\r\n\r\n", "503 Busy: nothing$"),
        (OK + TEXT + b"data: {\n\n", "an event is no completion: {$"),
        (OK + TEXT + b'data: {"choices": [7]}\n\n', "an event is no completion"),
        (OK + b"data: [DONE]\n\n", "the answer has no text"),
        (CHUNKED + b"zz\r\n", "the size of a chunk is zz, which is no hexadecimal number"),
        (CHUNKED + b"40\r\ndata:", CLOSED),
        (CHUNKED + b"5\r\ndata:\r\n", CLOSED),
        (CHUNKED + b"5\r\ndata:\r\n4", CLOSED),
        (b"", CLOSED),
        (b"HTTP/1.1 200", CLOSED),
        (b"HTTP/1.1 200 OK\r\ncontent-type: text", CLOSED),
    ],
)
def test_an_answer_that_is_none_is_a_failure_that_says_why(said: bytes, why: str) -> None:
    with served(Scripted(said)) as url, pytest.raises(EndpointFailed, match=why):
        asyncio.run(stream_answer(Endpoint("odd", url), "/completions", {}, 10))


def test_an_endpoint_that_falls_silent_is_a_failure_after_its_time() -> None:
    with (
        served(Scripted(OK + TEXT, hangs=True)) as url,
        pytest.raises(EndpointFailed, match=r"no whole answer within 0\.2 s"),
    ):
        asyncio.run(stream_answer(Endpoint("silent", url), "/completions", {}, 0.2))


def test_an_endpoint_that_nobody_listens_at_is_a_failure() -> None:
    with pytest.raises(EndpointFailed, match="ConnectionRefusedError"):
        asyncio.run(find_model(Endpoint("gone", "http://127.0.0.1:9/v1"), 10))


def test_a_url_without_its_end_is_told_as_text_with_a_hint(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with served(SmallServer(1)) as url, pytest.raises(SystemExit, match="why each failed stands above"):
        compared(monkeypatch, "--endpoint", f"a={url.removesuffix('/v1')}")

    why = f'404 Not Found: {{"detail": "Not Found"}}; the base URL usually ends in /v1: try {url}'
    first = capsys.readouterr().err.splitlines()[0]
    assert first == f"a failed before the first request: HTTP/1.1 {why}"


def test_a_url_with_its_end_gets_no_hint() -> None:
    with served(Scripted(NOT_FOUND)) as url, pytest.raises(EndpointFailed, match=r'"Not Found"\}$'):
        asyncio.run(stream_answer(Endpoint("a", url), "/completions", {}, 10))


def compared(monkeypatch: pytest.MonkeyPatch, *flags: str) -> None:
    """Runs the benchmark in this process."""
    monkeypatch.setattr(sys, "argv", ["compare", *flags])
    compare.main()


def test_a_key_is_what_its_variable_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMALL_KEY", "secret")

    assert keys_in({"small": "SMALL_KEY"}) == {"small": "secret"}


@pytest.mark.parametrize("value", [None, ""])
def test_a_key_whose_variable_is_not_set_is_refused_before_anything_is_sent(
    monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.delenv("SMALL_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("SMALL_KEY", value)
    server = SmallServer(100)

    with served(server) as url, pytest.raises(SystemExit, match="the environment variable SMALL_KEY is not"):
        compared(monkeypatch, "--endpoint", f"a={url}", "--key", "a=SMALL_KEY")
    assert server.bodies == []


def test_a_key_without_a_variable_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        compared(monkeypatch, "--endpoint", "a=http://127.0.0.1:9/v1", "--key", "a")

    assert "a: a key is NAME=VARIABLE" in capsys.readouterr().err


def test_the_help_names_the_default_of_every_flag(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        compared(monkeypatch, "--help")

    said = capsys.readouterr().out.partition("options:")[2]
    flags = dict(re.findall(r"^  (--[a-z-]+)(.*?)(?=^  -|\Z)", said, re.DOTALL | re.MULTILINE))
    assert len(flags) > 10
    shared = {"--json", "--plot"}  # of all benchmarks
    assert [flag for flag, text in flags.items() if "efault" not in text and flag not in shared] == []
    assert "default: 1,2,4,8,16,32,64" in " ".join(flags["--concurrency"].split())


def test_figures_pool_the_repeats_of_a_level() -> None:
    with served(SmallServer(4)) as url:
        level = asyncio.run(drive(Endpoint("small", url), "/completions", [{}] * 4, 2, 10))

    found = level_figures([level | {"seconds": 2.0}] * 2, ["xxxx", "y"])

    assert found["tokens_per_second"] == 14.0
    assert found["tokens_per_event"] == 1.75
    assert found["same_text"] == 0.5
    assert found["requests"] == 8


def test_only_requests_that_the_first_level_had_too_are_compared() -> None:
    record = level_record([], 1.0) | {"first_ms": [1.0], "token_ms": [0.0], "events": 1}
    records = [record | {"texts": ["a", "b", "c"]}, record | {"texts": ["a", "d", "c"]}]
    assert level_figures(records, ["a", "b"])["same_text"] == 0.75


def test_a_level_without_a_gap_has_gaps_of_zero() -> None:
    record = level_record([], 1.0) | {"texts": ["a"], "first_ms": [1.0], "token_ms": [0.0], "events": 1}
    found = level_figures([record], ["a"])

    assert found["gap_ms"] == {"p50": 0.0, "p99": 0.0}


@pytest.mark.slow
def test_our_front_is_measured_and_an_endpoint_that_dies_amid_the_run_is_left_out(
    bench: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    kept = tmp_path / "kept.jsonl"
    flags = ["--concurrency", "1,4", "--requests", "4", "--tokens", "8", "--resume", str(kept)]
    dying, lasting = SmallServer(1 + 4 + 2), SmallServer(100)
    with our_front() as ours, served(dying) as dies, served(lasting) as lasts:
        flags += ["--endpoint", f"ours={ours}", "--endpoint", f"dies={dies}"]
        flags += ["--endpoint", f"lasts={lasts}"]
        first = bench("compare", *flags, status=1)
        asked = len(lasting.bodies)
        dying.left = 100
        second = bench("compare", *flags)

    assert set(first["figures"]) == {"ours", "lasts"}
    assert first["failed"]["dies"]["concurrency"] == 4
    assert "broke off" in first["failed"]["dies"]["why"]
    assert first["figures"]["ours"]["4"]["requests"] == 4
    assert first["figures"]["ours"]["1"]["same_text"] == 1
    # What was measured is not measured again, and what failed is tried again.
    assert len(lasting.bodies) == asked
    assert set(second["figures"]) == {"ours", "dies", "lasts"}
    assert second["failed"] == {}
    assert second["figures"]["ours"] == first["figures"]["ours"]
    assert {body["model"] for body in lasting.bodies} == {"small"}
    assert all(body["stream"] and body["max_tokens"] == 8 for body in lasting.bodies)
