"""Bodies, from JSON to checked fields: the first fault is told, with its field, before any conversion."""

import json
from array import array
from typing import Any
from unittest import mock

import pytest

from orchestrator.front.http.bodies import reading
from orchestrator.front.http.bodies.bounds import BodyBounds, BodyKind
from orchestrator.front.http.bodies.reading import (
    ReadBody,
    needs_process,
    parse_json,
    read_fields,
    read_value,
    small_fields,
)
from orchestrator.front.http.chat.conversation import ChatConversation
from orchestrator.front.http.chat.planning import Rendered
from orchestrator.front.http.field_faults import FieldRefused
from orchestrator.front.http.json_pieces import PIECE, json_bytes, json_in_pieces

BOUNDS = BodyBounds(context=100, text_bytes=6_400, prompts=4, most_bytes=2**20)
BIASES = {str(id_): "x" for id_ in range(1025)}
LARGE = {"enum": ["x" * 70_000]}
USER = {"role": "user", "content": "x"}


def rendered(model: str | None, conversation: ChatConversation) -> Rendered:
    """A prompt of everything that a conversation has."""
    shown = (conversation.messages, conversation.tools, conversation.variables)
    return Rendered(json.dumps(shown, ensure_ascii=False), "{{ messages }}")


def read(kind: BodyKind, body: Any) -> ReadBody:
    return read_value(kind, body, BOUNDS, rendered)


def refused(kind: BodyKind, body: Any) -> FieldRefused:
    with pytest.raises(FieldRefused) as found:
        read(kind, body)
    return found.value


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("abc", ("abc",)),
        (["a", "b"], ("a", "b")),
        ([5, 6], (array("I", [5, 6]),)),
        ([[5], [2**32 - 1]], (array("I", [5]), array("I", [2**32 - 1]))),
    ],
)
def test_a_prompt_is_what_its_first_item_says(prompt: Any, prompts: tuple[Any, ...]) -> None:
    assert read(BodyKind.COMPLETION, {"prompt": prompt}).prompts == prompts


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ([1, "x", -1], "prompt[1]"),
        (["x", 1], "prompt[1]"),
        ([[1, 2], [3, -1]], "prompt[1][1]"),
        ([[1], 2], "prompt[1]"),
        ([True], "prompt[0]"),
        ([None], "prompt[0]"),
        ([1.0], "prompt[0]"),
        ([2**32], "prompt[0]"),
        (["\ud800"], "prompt[0]"),
        ([], "prompt"),
        (None, "prompt"),
        (5, "prompt"),
    ],
)
def test_the_first_wrong_item_of_a_prompt_is_named(prompt: Any, param: str) -> None:
    assert refused(BodyKind.COMPLETION, {"prompt": prompt}).param == param


@pytest.mark.parametrize(
    ("kind", "body", "message"),
    [
        (BodyKind.COMPLETION, {"prompt": ["x"] * 5}, "prompt has 5 prompts; at most 4 are answered at once"),
        (BodyKind.COMPLETION, {"prompt": [[-1]] * 5}, "prompt has 5 prompts; at most 4 are answered at once"),
        (BodyKind.COMPLETION, {"prompt": [-1] * 101}, "prompt has 101 entries; the context holds 100 ids"),
        (
            BodyKind.COMPLETION,
            {"prompt": [[], [-1] * 101]},
            "prompt[1] has 101 entries; the context holds 100 ids",
        ),
        (BodyKind.CHAT, {"messages": [5] * 101}, "messages has 101 entries; the context holds 100 ids"),
        (
            BodyKind.CHAT,
            {"messages": [USER, {"content": [5] * 101}]},
            "messages[1].content has 101 entries; the context holds 100 ids",
        ),
        (BodyKind.TOKENIZE, {"messages": [5] * 101}, "messages has 101 entries; the context holds 100 ids"),
        (BodyKind.DETOKENIZE, {"tokens": [-1] * 101}, "tokens has 101 entries; the context holds 100 ids"),
        (
            BodyKind.COMPLETION,
            {"prompt": "x", "prediction": {"type": "content", "content": [5] * 101}},
            "prediction.content has 101 entries; the context holds 100 ids",
        ),
        (
            BodyKind.COMPLETION,
            {"prompt": "x", "references": [5] * 17},
            "references has 17 texts; at most 16 are possible",
        ),
    ],
)
def test_counts_are_checked_before_anything_is_converted(
    kind: BodyKind, body: dict[str, Any], message: str
) -> None:
    with mock.patch.object(reading, "_validated", side_effect=AssertionError("it is converted")):
        assert str(refused(kind, body)) == message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stop_token_ids": [1] * 65}, "stop_token_ids has 65 entries; give at most 64"),
        ({"stop": ["x"] * 17}, "stop has 17 entries; give at most 16"),
        (
            {"logit_bias": BIASES},
            "logit_bias has 1025 entries; give at most 1024",
        ),
        ({"speculation": {"sources": ["x"] * 65}}, "speculation.sources has 65 entries; give at most 64"),
        ({"what": 1, "ever": 2}, "what is not supported here; leave it out"),
        ({"speculation": {"What Ever": 1}}, "speculation.What Ever is not supported here; leave it out"),
        (
            {"structured_outputs": {"json": LARGE}},
            "the schema has 70014 bytes; give at most 65536",
        ),
    ],
)
def test_what_is_too_much_is_told_with_its_number_and_the_possible_one(
    fields: dict[str, Any], message: str
) -> None:
    assert str(refused(BodyKind.COMPLETION, {"prompt": "x"} | fields)) == message


def test_a_refusal_quotes_little_of_a_large_value() -> None:
    for value in ("x" * 10_000, [["x" * 100] * 100] * 100, {"a" * 100: ["b" * 100] * 100}, 10**4_000):
        message = str(refused(BodyKind.COMPLETION, {"prompt": "x", "temperature": value}))
        assert message.startswith("temperature is ")
        assert len(message) < 1_000


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"[" * 100_000, b'{"a": ' + b"9" * 5_000 + b"}"])
def test_what_is_no_json_is_refused_as_a_whole(data: bytes) -> None:
    with pytest.raises(FieldRefused, match="the body is not JSON") as found:
        parse_json(data)
    assert found.value.param is None


HALF = "\ud800"
CALLED = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"title": HALF}}}]},
        {"messages": [{"role": "assistant", "tool_calls": [CALLED]}]},
        {"chat_template_kwargs": {"a": [HALF]}},
    ],
)
def test_half_a_character_deep_within_a_conversation_is_refused(fields: dict[str, Any]) -> None:
    assert read(BodyKind.CHAT, {"messages": [USER]}).rendered
    found = refused(BodyKind.CHAT, {"messages": [USER]} | fields)
    assert found.param == "messages"
    assert "the prompt has half a character at" in str(found)


def test_the_small_fields_are_all_but_prompts_and_texts_to_copy_from() -> None:
    body = {"prompt": "x", "n": 2, "logit_bias": {"5": 1.5}, "stop": "é"}
    body["prediction"] = {"type": "content", "content": "y"}
    body["references"] = ["v", "w"]
    kept = small_fields(body)
    assert json.loads(kept) == {"n": 2, "logit_bias": {"5": 1.5}, "stop": "é"}
    fields = read_fields(BodyKind.COMPLETION, kept)
    whole = read(BodyKind.COMPLETION, body)
    assert fields.model_dump() == whole.fields.model_dump(exclude={"prompt"}) | {
        "prediction": None,
        "references": None,
    }
    assert (whole.prediction, whole.references) == ("y", ("v", "w"))


def test_conversations_and_large_bodies_are_read_in_a_process() -> None:
    assert not needs_process(BodyKind.COMPLETION, 65_536)
    assert needs_process(BodyKind.COMPLETION, 65_537)
    assert needs_process(BodyKind.CHAT, 10)
    assert needs_process(BodyKind.TOKENIZE, 10)
    assert not needs_process(BodyKind.DETOKENIZE, 10)


async def test_json_in_pieces_is_the_json() -> None:
    values: list[Any] = [
        {},
        [],
        "é",
        {"a": list(range(3 * PIECE + 5)), "b": {"c": ["x"] * (2 * PIECE)}, "d": None},
        tuple(range(PIECE + 1)),
    ]
    for value in values:
        assert await json_in_pieces(value) == json_bytes(value)


async def test_half_a_surrogate_pair_is_written_as_json_escapes_it() -> None:
    schema = {"type": ["\ud800"], "\udfff": "é"}
    written = await json_in_pieces({"schema": schema})
    assert written == b'{"schema":{"type":["\\ud800"],"\\udfff":"\xc3\xa9"}}'
    assert json.loads(written) == {"schema": schema}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"speculation": []}, r"speculation is \[\]: Input should be an object$"),
        ({"prediction": "x"}, "prediction is 'x': Input should be an object$"),
        ({"model": "a" * 300}, "model has 300 characters; give at most 256$"),
        ({"stop": "a" * 300}, "stop has 300 characters; give at most 256$"),
        ({"stop": 5}, "a list of strings, of at most 256 bytes each$"),
    ],
)
def test_a_refusal_speaks_of_json_and_not_of_python(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(FieldRefused, match=says):
        read_value(BodyKind.COMPLETION, {"prompt": "a", **fields}, BOUNDS, rendered)
