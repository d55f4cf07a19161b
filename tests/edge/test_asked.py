"""The endpoint drafts for bodies that it understands whole; every other body is the cloud's, as it came."""

import json
from typing import Any

import pytest

from outrider.edge.endpoint.asked import read_body, with_defaults

TALK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
TEXT: dict[str, Any] = {"prompt": "def f("}


def read(body: Any, chat: bool) -> Any:
    return read_body(json.dumps(body).encode(), chat=chat)


def test_a_conversation_and_a_text_are_understood() -> None:
    talk = read(
        TALK | {"max_completion_tokens": 9, "temperature": 0, "stop": "\n", "stream": True}, chat=True
    )
    assert (talk.model, talk.stream, talk.usage) == ("m", True, False)
    assert talk.options["max_tokens"] == 9
    assert talk.options["stop"] == ["\n"]
    text = read(TEXT | {"top_k": -1, "logit_bias": {"7": -2}, "seed": 3, "user": None}, chat=False)
    assert text.prompt == "def f("
    assert (text.options["top_k"], text.options["logit_bias"], text.options["seed"]) == (0, {7: -2}, 3)
    assert read({"prompt": [5, 9]}, chat=False).prompt == (5, 9)


@pytest.mark.parametrize(
    "change",
    [
        {"n": 2},
        {"logprobs": True},
        {"tools": []},
        {"response_format": {"type": "json_object"}},
        {"temperature": "hot"},
        {"temperature": True},
        {"max_tokens": 0},
        {"max_tokens": 1.5},
        {"max_tokens": 4, "max_completion_tokens": 5},
        {"stop": [1]},
        {"stop_token_ids": ["1"]},
        {"logit_bias": {"x": 1}},
        {"stream_options": {"include_usage": True}},
        {"stream": True, "stream_options": {"continuous_usage_stats": True}},
        {"stream": "yes"},
        {"model": 5},
        {"speculation": {"enabled": False}},
        {"messages": []},
        {"messages": "hello"},
    ],
)
def test_what_a_device_does_not_draft_for_is_the_clouds(change: dict[str, Any]) -> None:
    assert read(TALK | change, chat=True) is None


@pytest.mark.parametrize("prompt", ["", [], ["a", "b"], [[1], [2]], [1.5], [True], 7, None])
def test_prompts_of_other_kinds_are_the_clouds(prompt: Any) -> None:
    assert read({"prompt": prompt}, chat=False) is None


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"7", b"\xff", b"[" * 100_000])
def test_what_is_no_body_is_the_clouds(data: bytes) -> None:
    assert read_body(data, chat=True) is None
    assert read(TALK, chat=False) is None
    assert read(TEXT, chat=True) is None


def test_the_models_own_parameters_hold_where_a_body_asks_for_none() -> None:
    asked = read(TEXT | {"temperature": 0.3}, chat=False).options
    merged = with_defaults(asked, {"temperature": 0.9, "top_p": 0.5, "unheard_of": 1}, 77)
    assert (merged["temperature"], merged["top_p"], merged["max_tokens"]) == (0.3, 0.5, 77)
    assert "unheard_of" not in merged
