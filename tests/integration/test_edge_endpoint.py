"""An unchanged program of OpenAI's client gets the cloud's text from the endpoint on its own machine."""

import http.client
import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from outrider.edge.edge_drafter import EdgeDrafter
from outrider.edge.endpoint.cloud import Cloud
from outrider.edge.endpoint.server import EdgeEndpoint
from outrider.edge.offer import PATIENCE_S
from tests.in_time import in_time
from tests.integration.live import ROOT, Up, until

ASKED: dict[str, Any] = {"prompt": "class Queue", "max_tokens": 40, "seed": 5}


@pytest.fixture(scope="module")
def endpoint(up: Up, tiny_llama: Path) -> Iterator[EdgeEndpoint]:
    with (
        EdgeDrafter(up.address, str(tiny_llama), mode="pipelined") as drafter,
        EdgeEndpoint(drafter, Cloud(up.http)) as running,
    ):
        yield running


def openai_at(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def cloud(up: Up) -> Iterator[openai.OpenAI]:
    with openai_at(up.http) as client:
        yield client


@pytest.fixture(scope="module")
def local(endpoint: EdgeEndpoint) -> Iterator[openai.OpenAI]:
    with openai_at(endpoint.url) as client:
        yield client


@pytest.fixture(scope="module")
def name(cloud: openai.OpenAI) -> str:
    return cloud.models.list().data[0].id


@pytest.mark.parametrize("way", [{"temperature": 0}, {"temperature": 0.8, "top_p": 0.9}, {}])
def test_a_text_is_the_clouds_and_the_device_drafted(
    endpoint: EdgeEndpoint, cloud: openai.OpenAI, local: openai.OpenAI, name: str, way: dict[str, Any]
) -> None:
    expected = cloud.completions.create(model=name, **ASKED, **way)

    def drafted() -> int:
        answer = local.completions.create(model=name, **ASKED, **way)
        assert answer.choices[0].text == expected.choices[0].text
        assert answer.choices[0].finish_reason == expected.choices[0].finish_reason
        assert answer.usage is not None
        assert expected.usage is not None
        assert answer.usage.completion_tokens == expected.usage.completion_tokens
        device = (answer.model_extra or {})["device"]
        assert device["trouble"] == ""
        return int(device["drafted"])

    until(drafted)  # on a busy machine an answer can be over before the device's thread runs


def test_a_stream_has_the_same_text_and_ends_with_the_usage(
    cloud: openai.OpenAI, local: openai.OpenAI, name: str
) -> None:
    asked = ASKED | {"temperature": 0.8, "stop": "e"}
    expected = cloud.completions.create(model=name, **asked)
    events = list(
        local.completions.create(model=name, **asked, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(event.choices[0].text for event in events if event.choices) == expected.choices[0].text
    assert [event.choices[0].finish_reason for event in events if event.choices][-1] == "stop"
    assert events[-1].usage is not None
    assert expected.usage is not None
    assert events[-1].usage.completion_tokens == expected.usage.completion_tokens


def test_what_the_device_does_not_draft_for_comes_from_the_cloud(
    cloud: openai.OpenAI, local: openai.OpenAI, name: str
) -> None:
    asked = ASKED | {"temperature": 0.8, "n": 2, "logprobs": 1}
    expected = cloud.completions.create(model=name, **asked)
    answer = local.completions.create(model=name, **asked)
    assert [choice.text for choice in answer.choices] == [choice.text for choice in expected.choices]
    assert answer.choices[0].logprobs is not None
    assert expected.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.tokens == expected.choices[0].logprobs.tokens
    streamed = local.completions.create(model=name, **asked, stream=True)
    assert "".join(event.choices[0].text for event in streamed if not event.choices[0].index) == (
        expected.choices[0].text
    )
    assert [model.id for model in local.models.list()] == [name]


def test_refusals_are_the_clouds_own(cloud: openai.OpenAI, local: openai.OpenAI, name: str) -> None:
    for wrong in ({"temperature": -3}, {"max_tokens": 10**6}, {"model": "no-such-model"}):
        refusals = []
        for client in (cloud, local):
            with pytest.raises(openai.APIStatusError) as refused:
                client.completions.create(**({"model": name} | ASKED | wrong))
            refusals.append((refused.value.status_code, refused.value.message))
        assert refusals[0] == refusals[1]


def test_the_endpoint_says_how_the_device_is_used(
    endpoint: EdgeEndpoint, local: openai.OpenAI, name: str
) -> None:
    local.completions.create(model=name, **ASKED)
    status, body = call(endpoint.url, "/edge")
    assert status == 200
    assert body["device"]["mode"] == "pipelined"
    assert body["explain"]["why"]
    asked = urllib.request.Request(f"{endpoint.url}/edge", headers={"Accept": "text/html,*/*;q=0.8"})
    with urllib.request.urlopen(asked, timeout=60) as page:
        assert page.headers["Content-Type"] == "text/html; charset=utf-8"
        assert "<b>pipelined</b>" in page.read().decode()


@pytest.mark.parametrize(
    "headers", [{"Origin": "https://evil.example"}, {"Host": "evil.example"}, {"Host": "["}]
)
def test_pages_of_other_sites_are_refused(endpoint: EdgeEndpoint, headers: dict[str, str]) -> None:
    status, body = call(endpoint.url, "/v1/models", headers)
    assert (status, body["error"]["type"]) == (403, "permission_error")


def test_a_length_in_digits_that_are_none_is_refused(endpoint: EdgeEndpoint) -> None:
    status, body = call(endpoint.url, "/v1/models", {"Content-Length": "\xb2"})
    assert (status, body["error"]["message"]) == (411, "send Content-Length, up to 64 MiB")


def call(url: str, path: str, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
    try:
        connection.request("GET", path, headers=headers or {})
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


@pytest.mark.slow
@pytest.mark.parametrize("drafts_arrive", [True, False])
def test_the_command_serves_until_it_is_stopped(
    up: Up, tiny_llama: Path, name: str, drafts_arrive: bool
) -> None:
    address = up.address if drafts_arrive else "127.0.0.1:1"
    command = [sys.executable, "-m", "outrider.cli", "edge", "--server", up.http, "--address", address]
    command += ["--draft-with", str(tiny_llama), "--bind", "127.0.0.1:0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout is not None
        try:
            url = json.loads(process.stdout.readline())["http"]
            began = time.monotonic()
            with openai_at(url) as client:
                assert client.completions.create(model=name, **ASKED).choices[0].text
            in_time(time.monotonic() - began < PATIENCE_S / 2, "the app waited for drafts")
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
