"""The edge benchmark runs small, end to end, and its link delays, loses and cuts as it says."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from benchmarks.edge.delayed_link import LEAST_RETRANSMISSION_MS, DelayedLink
from tests.in_time import in_time


@pytest.mark.slow
def test_the_edge_benchmark_prints_what_its_schema_says(bench: Callable[..., dict[str, Any]]) -> None:
    result = bench("edge", "--distances", "1,30", "--prompts", "1", "--tokens", "48")
    assert result["rtt_ms"] == [1, 30]
    assert result["measured_rtt_ms"][1] >= 30
    assert result["rounds_per_token"]["cloud"] == [pytest.approx(1, abs=0.05)] * 2
    in_time(min(result["rounds_per_token"]["pipelined"]) < 0.6, result["rounds_per_token"])


@pytest.fixture
def echo() -> Iterator[str]:
    """host:port of a server that sends back what it gets."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    def answer(connection: socket.socket) -> None:
        with connection:
            while data := connection.recv(1 << 16):
                connection.sendall(data)

    threading.Thread(target=serve, daemon=True).start()
    host, port = server.getsockname()
    yield f"{host}:{port}"
    server.shutdown(socket.SHUT_RDWR)
    server.close()


def dialled(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=10)


def test_bytes_arrive_whole_in_order_and_a_round_trip_late(echo: str) -> None:
    with DelayedLink(echo, rtt_ms=30) as link, dialled(link.address) as connection:
        began, sent, got = time.monotonic(), bytes(range(256)) * 64, b""
        connection.sendall(sent)
        while len(got) < len(sent):
            got += connection.recv(1 << 16)
        assert got == sent
        assert time.monotonic() - began >= 0.03
        assert (link.bytes_up, link.bytes_down) == (len(sent), len(sent))


def test_a_lost_segment_comes_later_and_holds_up_those_behind_it(echo: str) -> None:
    with DelayedLink(echo, rtt_ms=2, loss=0.9999) as link, dialled(link.address) as connection:
        began = time.monotonic()
        connection.sendall(b"a")
        assert connection.recv(1) == b"a"
        assert time.monotonic() - began >= 2 * LEAST_RETRANSMISSION_MS / 1000


def test_a_cut_ends_connections_and_lets_new_ones_in(echo: str) -> None:
    with DelayedLink(echo) as link:
        with dialled(link.address) as connection:
            connection.sendall(b"a")
            assert connection.recv(1) == b"a"
            link.cut()
            with contextlib.suppress(ConnectionError):
                assert connection.recv(1) == b""
        with dialled(link.address) as again:
            again.sendall(b"b")
            assert again.recv(1) == b"b"


@pytest.mark.slow
def test_the_drafting_benchmark_runs_without_llama_cpp(bench: Callable[..., dict[str, Any]]) -> None:
    result = bench("edge-drafting", "--prompts", "1", "--tokens", "24")
    torch = result["arms"]["torch"]
    assert 0 < torch["acceptance"][0] <= 1
    assert min(torch["tokens_per_pass"]) >= 1
    assert set(result["arms"]) | set(result["missing"]) > {"torch"}


@pytest.mark.slow
def test_the_load_benchmark_counts_work_and_idle_streams(bench: Callable[..., dict[str, Any]]) -> None:
    flags = ("--sessions", "1,2", "--tokens", "24", "--repeats", "1", "--streams", "20", "--idle-s", "0.5")
    result = bench("edge-load", *flags)
    for without, drafted in zip(result["without_devices"], result["with_devices"], strict=True):
        assert without["rounds_per_token"] == pytest.approx(1, abs=0.1)
        in_time(drafted["rounds_per_token"] < without["rounds_per_token"], result)
    assert set(result["idle"]) == {"streams", "grpc_without_device", "grpc", "websocket"}
