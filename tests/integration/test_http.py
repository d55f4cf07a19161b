"""The same answers over HTTP as over gRPC, from the same three processes."""

import json
import re
import shlex
import urllib.request
from pathlib import Path
from typing import Any

import openai
import pytest

from outrider.client import Client
from tests.integration.live import REQUEST, Up

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def over_http(up: Up) -> Any:
    with openai.OpenAI(base_url=f"{up.http}/v1", api_key="any", max_retries=0) as client:
        yield client


def test_ids_and_text_are_those_of_grpc(over_http: openai.OpenAI, client: Client) -> None:
    name = client.models()[0].name
    asked = {"n": 2, "max_tokens": 24, "temperature": 0.8, "seed": 11}
    wanted = client.generate(ids=REQUEST["ids"], **asked)
    for speculation in ({"enabled": True}, {"enabled": False}, {"nodes": 3, "sources": ["lookup"]}):
        extra = {"return_token_ids": True, "speculation": speculation}
        got = over_http.completions.create(model=name, prompt=REQUEST["ids"], extra_body=extra, **asked)
        assert [choice.text for choice in got.choices] == [choice.text for choice in wanted.choices]
        ids = [tuple((choice.model_extra or {})["token_ids"]) for choice in got.choices]
        assert ids == [choice.ids for choice in wanted.choices]


def test_a_text_is_tokenized_as_over_grpc(over_http: openai.OpenAI, client: Client) -> None:
    name = client.models()[0].name
    stream = over_http.completions.create(
        model=name, prompt="def add", max_tokens=20, temperature=0, stop=["return"], stream=True
    )
    text = "".join(choice.text for event in stream for choice in event.choices)
    assert text == client.generate("def add", max_tokens=20, temperature=0, stop=["return"]).text


def test_accepted_drafts_are_those_of_the_usage(over_http: openai.OpenAI, client: Client) -> None:
    name = client.models()[0].name
    for _ in range(100):  # on a busy machine the drafts may be late for all of a request
        got = over_http.completions.create(
            model=name,
            prompt=REQUEST["ids"],
            max_tokens=200,
            temperature=0,
            extra_body={"ignore_eos": True, "per_request_spec_decode_metrics": "detailed"},
        )
        assert got.usage is not None
        metrics = (got.model_extra or {})["metrics"]["speculative_decoding"]
        if accepted := metrics["num_accepted_draft_tokens"]:
            break
    assert accepted
    assert sum(metrics["per_step_accepted"]) == accepted
    assert accepted + metrics["num_spec_steps"] - got.usage.completion_tokens in (0, 1), (
        "the last may end early"
    )


def test_a_model_without_a_chat_template_refuses_conversations(over_http: openai.OpenAI) -> None:
    name = over_http.models.list().data[0].id
    with pytest.raises(openai.BadRequestError, match="has no chat template"):
        over_http.chat.completions.create(model=name, messages=[{"role": "user", "content": "x"}])


def test_the_example_of_the_documents_runs(up: Up) -> None:
    for document in ("README.md", "docs/http.md"):
        text = (ROOT / document).read_text()
        (command,) = re.findall(r"^curl -s http://127\.0\.0\.1:8000/v1/completions .*$", text, re.MULTILINE)
        words = shlex.split(command, comments=True)
        body = words[words.index("-d") + 1].replace("\n", " ")
        request = urllib.request.Request(
            f"{up.http}/v1/completions", body.encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=100) as response:
            assert json.load(response)["choices"][0]["finish_reason"] in ("stop", "length")


def test_its_address_is_announced(up: Up) -> None:
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+", up.http)
    with urllib.request.urlopen(f"{up.http}/health", timeout=100) as response:
        assert response.status == 200
