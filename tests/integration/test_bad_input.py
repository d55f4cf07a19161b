"""Everything a client can do wrong, through real processes: a clear error, and nobody else notices."""

import math
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from outrider.client import Client, Completion
from outrider.v1.generation_pb2 import CancelRequest
from speculative.errors import InvalidRequest, OutriderError, Superseded, Unavailable, UnknownModel
from tests.in_time import in_time
from tests.integration.live import REQUEST, ROOT, Up, stopped, until

pytestmark = pytest.mark.usefixtures("unmoved")

RUNNING = "outrider_orchestrator_requests"

BAD: dict[str, tuple[dict[str, Any], type[OutriderError], str]] = {
    "empty text": ({"prompt": ""}, InvalidRequest, "empty"),
    "no ids": ({"ids": []}, InvalidRequest, "empty"),
    "an id outside the vocabulary": ({"ids": [5, 96]}, InvalidRequest, "ids are below 96"),
    "a prompt longer than the context": ({"ids": [5] * 256}, InvalidRequest, "256 ids"),
    "10 MB of text": ({"prompt": "x" * 10_000_000}, InvalidRequest, "too large"),
    "no tokens": ({"ids": [5], "max_tokens": 0}, InvalidRequest, "max_tokens is 0; 1 to 255"),
    "negative tokens": ({"ids": [5], "max_tokens": -1}, InvalidRequest, "max_tokens is -1; 1 to 255"),
    "enormous tokens": ({"ids": [5], "max_tokens": 10**15}, InvalidRequest, "1 to 255 are possible"),
    "temperature NaN": ({"ids": [5], "temperature": math.nan}, InvalidRequest, "temperature is nan"),
    "negative temperature": ({"ids": [5], "temperature": -0.1}, InvalidRequest, "temperature is -0.1"),
    "top_p 0": ({"ids": [5], "top_p": 0.0}, InvalidRequest, "top_p is 0"),
    "top_p 1.5": ({"ids": [5], "top_p": 1.5}, InvalidRequest, "top_p is 1.5"),
    "top_k beyond the vocabulary": ({"ids": [5], "top_k": 97}, InvalidRequest, "top_k is 97"),
    "a penalty of infinity": ({"ids": [5], "presence_penalty": math.inf}, InvalidRequest, "presence_penalty"),
    "a bias outside the vocabulary": ({"ids": [5], "logit_bias": {96: 1.0}}, InvalidRequest, "96"),
    "a thousand stop strings": ({"ids": [5], "stop": ["x"] * 1000}, InvalidRequest, "1000"),
    "an empty stop string": ({"ids": [5], "stop": [""]}, InvalidRequest, "0 bytes"),
    "an unknown model": ({"ids": [5], "model": "gpt-7"}, UnknownModel, "gpt-7"),
    "an unknown source": ({"ids": [5], "sources": ["dreams"]}, InvalidRequest, "lookup, drafter"),
    "a million nodes": ({"ids": [5], "nodes": 10**6}, InvalidRequest, "node_limit is 1000000"),
    "no answers": ({"ids": [5], "n": 0}, InvalidRequest, "n is 0; 1 to 16"),
    "a thousand answers": ({"ids": [5], "n": 1000}, InvalidRequest, "n is 1000; 1 to 16"),
    "more tokens at least than at most": (
        {"ids": [5], "max_tokens": 4, "min_tokens": 5},
        InvalidRequest,
        "min_tokens is 5, but at most 4 ids may be generated; 0 to 4",
    ),
    "fewer tokens than none": ({"ids": [5], "min_tokens": -1}, InvalidRequest, "min_tokens is -1"),
    "a stop id outside the vocabulary": ({"ids": [5], "stop_ids": [96]}, InvalidRequest, "stop_ids has 96"),
    "65 stop ids": ({"ids": [5], "stop_ids": range(65)}, InvalidRequest, "stop_ids has 65 ids"),
    "21 logprobs": (
        {"ids": [5], "logprobs": True, "top_logprobs": 21},
        InvalidRequest,
        "top_logprobs is 21; 0 to 20",
    ),
    "top logprobs without logprobs": ({"ids": [5], "top_logprobs": 1}, InvalidRequest, "not asked for"),
    "a session's name too long": ({"ids": [5], "session": "s" * 129}, InvalidRequest, "session"),
    "a tenant's name with a line break": ({"ids": [5], "tenant": "a\nb"}, InvalidRequest, "tenant"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_request_is_refused_by_name(client: Client, what: str) -> None:
    request, error, says = BAD[what]
    with pytest.raises(error) as caught:
        client.generate(**request)
    assert says in str(caught.value)
    assert type(caught.value) is error


@pytest.mark.parametrize("role", ["orchestrator", "verifier", "drafter"])
def test_garbage_bytes_on_a_port_bother_nobody(up: Up, client: Client, role: str) -> None:
    address = next(process["address"] for process in up.processes if process["role"] == role)
    host, _, port = address.rpartition(":")
    held = client.stream(ids=[5, 9], max_tokens=200, seed=4)
    for garbage in (
        os.urandom(4096),
        b"GET / HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + os.urandom(4096),
    ):
        with socket.create_connection((host, int(port)), timeout=100) as connection:
            connection.sendall(garbage)
    assert held.completion().ids == client.generate(ids=[5, 9], max_tokens=200, seed=4, speculation=False).ids


def test_a_message_that_is_none_fails_its_own_call_alone(up: Up) -> None:
    with grpc.insecure_channel(up.address) as channel:
        call = channel.stream_stream("/outrider.v1.Generation/Generate")
        with pytest.raises(grpc.RpcError):
            list(call(iter([b"\xff" * 100]), timeout=100))
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary("/outrider.v1.Generation/Nothing")(b"", timeout=100)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        cancel = channel.unary_unary("/outrider.v1.Generation/Cancel")
        with pytest.raises(grpc.RpcError) as caught:
            cancel(CancelRequest(session="").SerializeToString(), timeout=100)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_client_that_is_killed_frees_its_session(up: Up) -> None:
    code = (
        "import sys\nfrom outrider.client import Client\n"
        "client = Client(sys.argv[1])\n"
        "held = [client.stream(ids=[5], max_tokens=250, logit_bias={1: -100.0}, nodes=0) for _ in range(4)]\n"
        "next(held[-1])\nprint('on', flush=True)\nimport time\ntime.sleep(60)\n"
    )
    client = subprocess.Popen(
        [sys.executable, "-c", code, up.address], stdout=subprocess.PIPE, cwd=ROOT, env=os.environ
    )
    assert client.stdout is not None
    assert client.stdout.readline() == b"on\n"
    client.kill()
    client.wait()
    client.stdout.close()
    until(lambda: up.metric("verifier", "outrider_num_requests_running") == 0)
    until(lambda: up.metric("orchestrator", RUNNING) == 0)


def test_cancel_by_name_ends_a_request_with_what_it_has(up: Up, client: Client) -> None:
    with ThreadPoolExecutor(1) as canceller:
        for _ in range(20):  # on a busy machine the verifier may be done before it hears of the Cancel
            with stopped(up.children()["verifier"]):
                stream = client.stream(ids=[5], max_tokens=250, session="mine", logit_bias={1: -100.0})
                until(lambda: up.metric("orchestrator", RUNNING) == 1)
                found = canceller.submit(client.cancel, "mine")
                time.sleep(0.2)
            completion = stream.completion()
            if completion.finish_reason == "cancelled":
                break
    assert found.result()
    assert completion.finish_reason == "cancelled"
    assert len(completion.ids) < 250
    assert not client.cancel("mine")


def test_a_deadline_is_kept(up: Up, client: Client) -> None:
    with stopped(up.children()["verifier"]):
        began = time.monotonic()
        with pytest.raises(Unavailable):
            client.generate(ids=[5], timeout=0.5)
        in_time(time.monotonic() - began < 15, "it ended when the verifier was given up")


def test_the_later_of_two_requests_has_the_session(up: Up, client: Client, plain_answer: Completion) -> None:
    with stopped(up.children()["verifier"]):
        earlier = client.stream(ids=[5], session="twice")
        until(lambda: up.metric("orchestrator", RUNNING) == 1)
        later = client.stream(**REQUEST, session="twice")
        until(lambda: up.metric("orchestrator", RUNNING) == 2)
    assert later.completion().ids == plain_answer.ids
    with pytest.raises(Superseded, match="twice"):
        earlier.completion()
