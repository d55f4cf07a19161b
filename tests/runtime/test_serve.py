"""One service as a process: it binds, loads, announces, serves and stops."""

import os
import random
import resource
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from outrider.runtime.children import ServiceFailed, ServiceProcess
from outrider.v1 import generation_pb2, generation_pb2_grpc
from outrider.wire.channel import open_channel, open_sync_channel
from tests.integration.live import sample

StartToy = Callable[..., ServiceProcess]
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def health(address: str, service: str) -> int:
    with open_sync_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=service)
        return int(stub.Check(request, timeout=100, wait_for_ready=True).status)


def models(address: str) -> list[str]:
    with open_sync_channel(address) as channel:
        answer = generation_pb2_grpc.GenerationStub(channel).ListModels(
            generation_pb2.ListModelsRequest(), timeout=100
        )
        return [model.name for model in answer.models]


def get(address: str, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=100) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_a_service_announces_where_it_serves_and_answers_there(toy: ServiceProcess) -> None:
    assert models(toy.address) == ["toy"]


def test_what_libraries_print_does_not_reach_standard_output(start_toy: StartToy) -> None:
    toy = start_toy()
    toy.terminate()
    assert toy._process.stdout is not None
    assert toy._process.stdout.read() == b""


def test_a_service_may_open_as_many_files_as_the_system_grants(start_toy: StartToy) -> None:
    few, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(few, 1024), most))
    try:
        toy = start_toy()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, most))
    assert resource.prlimit(toy.pid, resource.RLIMIT_NOFILE) == (most, most)


@pytest.mark.parametrize("name", ["", "readiness", "outrider.v1.Generation"])
def test_a_ready_service_is_healthy_under_each_name(toy: ServiceProcess, name: str) -> None:
    assert health(toy.address, name) == SERVING


def test_an_unknown_name_has_no_health(toy: ServiceProcess) -> None:
    with pytest.raises(grpc.RpcError) as error:
        health(toy.address, "outrider.v1.Nothing")
    assert error.value.code() is grpc.StatusCode.NOT_FOUND


def test_a_loading_service_is_live_but_not_ready(start_toy: StartToy) -> None:
    port, http_port = free_port(), free_port()
    flags = ("--bind", f"127.0.0.1:{port}", "--metrics-bind", f"127.0.0.1:{http_port}", "--load-s", "60")
    start_toy(*flags, wait=False)
    assert health(f"127.0.0.1:{port}", "") == SERVING
    assert health(f"127.0.0.1:{port}", "readiness") == NOT_SERVING
    assert health(f"127.0.0.1:{port}", "outrider.v1.Generation") == NOT_SERVING
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            assert get(f"127.0.0.1:{http_port}", "/healthz")[0] == 200
            break
        except urllib.error.URLError:
            time.sleep(0.05)
    assert get(f"127.0.0.1:{http_port}", "/readyz")[0] == 503


def test_loaded_objects_are_exempt_from_garbage_collection(toy: ServiceProcess) -> None:
    with open_sync_channel(toy.address) as channel:
        request = generation_pb2.CancelRequest(session="frozen")
        assert generation_pb2_grpc.GenerationStub(channel).Cancel(request, timeout=100).found


def test_counts_and_probes_are_served_over_http(toy: ServiceProcess) -> None:
    before = sample(toy.metrics, "outrider_drafter_calls_total")
    models(toy.address)
    assert get(toy.metrics, "/metrics")[0] == 200
    assert sample(toy.metrics, "outrider_drafter_calls_total") == before + 1
    assert get(toy.metrics, "/healthz") == (200, "ok\n")
    assert get(toy.metrics, "/readyz") == (200, "ok\n")
    assert get(toy.metrics, "/other")[0] == 404


def test_reflection_lists_the_services(toy: ServiceProcess) -> None:
    with open_sync_channel(toy.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        answer = next(iter(stub.ServerReflectionInfo(iter([request]), timeout=100)))
    names = {service.name for service in answer.list_services_response.service}
    assert names == {
        "outrider.v1.Generation",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }


@pytest.mark.parametrize(
    "method",
    ["grpc.health.v1.Health/Check", "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"],
)
@pytest.mark.parametrize("sent", [b"\xff" * 50, b"\x0a\xff\xff\x04" + b"a" * 65_535])
def test_what_health_and_reflection_cannot_read_is_refused_without_a_trace(
    toy: ServiceProcess, toy_folder: Path, method: str, sent: bytes
) -> None:
    with grpc.insecure_channel(toy.address) as channel:
        call = channel.stream_stream(f"/{method}")
        with pytest.raises(grpc.RpcError) as refused:
            list(call(iter([sent]), timeout=100))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert health(toy.address, "") == SERVING
    assert "Traceback" not in (toy_folder / "toy.log").read_text()


@pytest.mark.parametrize("kind", ["random", "http/1", "half a preface", "frames after a preface", "tls"])
def test_garbage_on_the_port_does_no_harm(toy: ServiceProcess, kind: str) -> None:
    noise = random.Random(0)
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    garbage = {
        "random": noise.randbytes(100_000),
        "http/1": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        "half a preface": preface[:10],
        "frames after a preface": preface + noise.randbytes(50_000),
        "tls": b"\x16\x03\x01\x02\x00\x01" + noise.randbytes(512),
    }[kind]
    host = toy.address.rpartition(":")[0]
    with open_sync_channel(toy.address) as held:
        stub = generation_pb2_grpc.GenerationStub(held)
        stub.ListModels(generation_pb2.ListModelsRequest(), timeout=100)
        for at in (toy.address, toy.metrics):
            with socket.create_connection((host, int(at.rpartition(":")[2])), timeout=100) as raw:
                try:
                    raw.sendall(garbage)
                    raw.settimeout(0.3)
                    raw.recv(1024)
                except OSError:
                    pass  # hung up on, or not answered: both are fine
        assert len(stub.ListModels(generation_pb2.ListModelsRequest(), timeout=100).models) == 1
    assert models(toy.address) == ["toy"]
    assert get(toy.metrics, "/healthz")[0] == 200
    assert toy.poll() is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_the_service_with_status_0(start_toy: StartToy, number: signal.Signals) -> None:
    toy = start_toy()
    os.kill(toy.pid, number)
    assert toy._wait(60) == 0


def test_several_signals_are_one(start_toy: StartToy) -> None:
    toy = start_toy()
    for _ in range(5):
        toy.terminate()
        time.sleep(0.01)
    assert toy._wait(60) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_comes_as_the_process_ends_changes_no_status(
    start_toy: StartToy, number: signal.Signals
) -> None:
    toy = start_toy("--late-signal", str(number.value))
    toy.terminate()
    assert toy._wait(60) == 0


async def test_an_open_stream_ends_in_order_when_the_service_stops(start_toy: StartToy) -> None:
    toy = start_toy()
    async with open_channel(toy.address) as channel:
        call = generation_pb2_grpc.GenerationStub(channel).Generate()
        await call.write(generation_pb2.GenerateRequest(start=generation_pb2.GenerateStart(session="hold")))
        await call.read()
        await call.done_writing()
        toy.terminate()
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK
    assert toy._wait(60) == 0


def test_the_service_stops_at_once_while_a_thread_still_loads(start_toy: StartToy) -> None:
    port = free_port()
    toy = start_toy("--bind", f"127.0.0.1:{port}", "--block-s", "60", wait=False)
    assert health(f"127.0.0.1:{port}", "") == SERVING
    toy.terminate()
    assert toy._wait(30) == 0


def test_a_refused_model_is_announced_as_an_error(start_toy: StartToy) -> None:
    with pytest.raises(ServiceFailed, match="the model type mamba is not served") as failed:
        start_toy("--fault", "refused")
    assert failed.value.code == "FAILED_PRECONDITION"


def test_any_other_fault_while_loading_is_announced_too(start_toy: StartToy) -> None:
    with pytest.raises(ServiceFailed, match="RuntimeError: a bug") as failed:
        start_toy("--fault", "bug")
    assert failed.value.code == "INTERNAL"


@pytest.mark.parametrize("flag", ["--bind", "--metrics-bind"])
def test_a_port_that_is_taken_is_an_error(start_toy: StartToy, toy: ServiceProcess, flag: str) -> None:
    with pytest.raises(ServiceFailed, match=toy.address):
        start_toy(flag, toy.address)


def test_a_service_that_fails_later_ends_with_status_1(start_toy: StartToy) -> None:
    toy = start_toy()
    with open_sync_channel(toy.address) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        stub.Cancel(generation_pb2.CancelRequest(session="fail"), timeout=100)
    assert toy._wait(60) == 1
