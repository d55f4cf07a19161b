"""Every invalid value of a body is refused by its field's name, as the body calls the field."""

import asyncio
import json
from typing import Any

import pytest

from orchestrator.front.http.errors import describe_error, param_of
from outrider.tokens import TokenTable
from speculative.errors import InvalidRequest
from tests.orchestrator.conftest import World
from tests.orchestrator.front.sending import CHAT, TEXT, send
from tests.orchestrator.front.test_http_completions import asking

BOTH: list[tuple[dict[str, Any], str]] = [
    ({"prediction": {"type": "image", "content": "x"}}, "prediction.type"),
    ({"prediction": {"type": "content", "content": 5}}, "prediction.content"),
    ({"prediction": {"type": "content", "content": "x" * 64}}, "prediction"),
    ({"prediction": {"type": "content", "content": "x" * 100_000}}, "prediction"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "json_object": True}}, "structured_outputs"),
    ({"structured_outputs": {"choice": ["a"], "grammar": "start: A"}}, "structured_outputs"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs"),
    ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs"),
    ({"structured_outputs": {"choice": ["a", 5]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": ["a"] * 1_025}}, "structured_outputs.choice"),
    ({"structured_outputs": {"grammar": ""}}, "structured_outputs"),
    ({"structured_outputs": {"grammar": 5}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"regex": ""}}, "structured_outputs"),
    ({"structured_outputs": {"json": "[]"}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "text"}}, "structured_outputs"),
    ({"structured_outputs": {"json_object": True}, "ignore_eos": True}, "ignore_eos"),
    ({"speculation": {"corpora": ["../x"]}}, "speculation.corpora"),
    ({"speculation": {"corpora": ["x"] * 17}}, "speculation.corpora"),
    ({"speculation": {"learn": "no"}}, "speculation.learn"),
    ({"best": 2}, "best"),
    ({"logit_bias": {"05": 1}}, "logit_bias"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 65}, "max_tokens"),
    ({"max_tokens": "4"}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"temperature": 101}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 97}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"contrast_strength": 10.5}, "contrast_strength"),
    ({"contrast_strength": -1}, "contrast_strength"),
    ({"contrast_strength": "0.5"}, "contrast_strength"),
    ({"contrast_plausibility": 0.2}, "contrast_plausibility"),
    ({"contrast_strength": 0, "contrast_plausibility": 0.2}, "contrast_plausibility"),
    ({"contrast_strength": 0.5, "contrast_plausibility": 0}, "contrast_plausibility"),
    ({"contrast_strength": 0.5, "contrast_plausibility": 1.5}, "contrast_plausibility"),
    ({"presence_penalty": 101}, "presence_penalty"),
    ({"frequency_penalty": "x"}, "frequency_penalty"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"\u0663": 1}}, "logit_bias"),
    ({"logit_bias": {"96": 1}}, "logit_bias"),
    ({"logit_bias": {"9999999999": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"min_tokens": 5}, "min_tokens"),
    ({"stop": [""]}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop_token_ids": [96]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"seed": 2**64}, "seed"),
    ({"n": 0}, "n"),
    ({"n": 17}, "n"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"other": True}}, "stream_options.other"),
    ({"stream": True, "per_request_spec_decode_metrics": "summary"}, "per_request_spec_decode_metrics"),
    ({"speculation": {"sources": ["nobody"]}}, "speculation.sources"),
    ({"speculation": {"nodes": 257}}, "speculation.nodes"),
    ({"speculation": {"policy": "best"}}, "speculation.policy"),
    ({"speculation": {"policy": "fixed:0"}}, "speculation.policy"),
    ({"speculation": {"enabled": False, "policy": "fixed"}}, "speculation.policy"),
    ({"speculation": {"device": 1}}, "speculation.device"),
    ({"speculation": {"enabled": False, "sources": ["lookup"]}}, "speculation.sources"),
    ({"speculation": {"enabled": False, "corpora": ["code"]}}, "speculation.corpora"),
    ({"speculation": {"enabled": False, "nodes": 1}}, "speculation.nodes"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "text", "json_schema": {}}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
]
ONLY_TEXT: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": [96]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": "x" * 65}, "prompt"),
    ({"prompt": "x" * 100_000}, "prompt"),
    ({"prompt": ["x"] * 300}, "prompt"),
    ({"echo": 0}, "echo"),
    ({"echo": True, "suffix": "x"}, "echo"),
    ({"echo": True, "return_token_ids": True}, "echo"),
    ({"contrast_strength": 0.5, "echo": True, "logprobs": 0}, "contrast_strength"),
    ({"suffix": "x"}, "suffix"),
    ({"suffix": "x" * 100_000}, "suffix"),
    ({"suffix": 5}, "suffix"),
    ({"tools": None}, "tools"),
    ({"best_of": 2}, "best_of"),
    ({"best_of": True}, "best_of"),
    ({"best_of": 1.0}, "best_of"),
    ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object"),
    ({"logprobs": 21}, "logprobs"),
]
ADD = {"type": "function", "function": {"name": "add"}}
CYCLE = {
    "properties": {"a": {"$ref": "#/$defs/b"}},
    "$defs": {"b": {"$ref": "#/$defs/c"}, "c": {"$ref": "#/$defs/b"}},
}


def adding(schema: dict[str, Any]) -> dict[str, Any]:
    """A tool with these parameters."""
    return {"type": "function", "function": {"name": "add", "parameters": schema}}


def calling(arguments: str) -> dict[str, Any]:
    """A call with these arguments."""
    return {"id": "a", "type": "function", "function": {"name": "add", "arguments": arguments}}


def allowing(mode: str, *names: str) -> dict[str, Any]:
    """A choice among these functions."""
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


ONLY_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x" * 100}]}, "messages"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"max_completion_tokens": 3}, "max_tokens"),
    ({"tools": [{"type": "function", "function": {"name": "x y"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [ADD] * 2}, "tools[1].function.name"),
    ({"tools": [ADD] * 10_000}, "tools"),
    ({"tools": [adding({"type": "array"})]}, "tools[0].function.parameters"),
    ({"tools": [adding({"type": "objekt"})]}, "tools[0].function.parameters"),
    ({"tools": [adding({"properties": {"a": 5}})]}, "tools[0].function.parameters.properties.a"),
    ({"tools": [adding({"properties": []})]}, "tools[0].function.parameters"),
    ({"tools": [adding({"required": "a"})]}, "tools[0].function.parameters"),
    ({"tools": [adding({"items": {"enum": []}})]}, "tools[0].function.parameters.items"),
    ({"tools": [adding({"anyOf": []})]}, "tools[0].function.parameters"),
    ({"tools": [adding({"$ref": "#"})]}, "tools[0].function.parameters"),
    ({"tools": [adding(CYCLE)]}, "tools[0].function.parameters.properties.a"),
    ({"tools": [adding({"items": {"$ref": "http://x"}})]}, "tools[0].function.parameters.items"),
    (
        {"tools": [adding({"$ref": f"#/anyOf/{'9' * 5000}", "anyOf": [{}]})]},
        "tools[0].function.parameters",
    ),
    ({"tools": [adding({"x-guidance": {}})]}, "tools[0].function.parameters"),
    (
        {"tools": [adding({"properties": {"a": {"minItems": "x"}}})]},
        "tools[0].function.parameters.properties.a",
    ),
    ({"tools": [adding({"properties": {"a": {"pattern": 5}}})]}, "tools[0].function.parameters.properties.a"),
    ({"tools": [ADD], "tool_choice": "sometimes"}, "tool_choice"),
    ({"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice"),
    ({"tools": [ADD], "tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [ADD], "tool_choice": allowing("auto", "sub")}, "tool_choice"),
    ({"tools": [ADD], "tool_choice": allowing("never", "add")}, "tool_choice.allowed_tools.mode"),
    ({"tools": [ADD], "tool_choice": allowing("auto")}, "tool_choice.allowed_tools.tools"),
    ({"tools": [ADD], "tool_choice": allowing("required", "add")}, "tool_choice"),
    ({"tool_choice": allowing("auto", "add")}, "tool_choice"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "a"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "user", "content": "x", "tool_call_id": "a"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "user", "tool_calls": [calling("{}")]}]}, "messages[0].tool_calls"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [calling("{")]}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [calling("[]")]}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
    *[
        (
            {"messages": [{"role": "assistant", "tool_calls": [calling(f'{{"a": {number}}}')]}]},
            "messages[0].tool_calls[0].function.arguments",
        )
        for number in ("NaN", "-Infinity", "1e999")
    ],
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"continue_final_message": True}, "continue_final_message"),
    (
        {
            "messages": [{"role": "assistant", "content": "x"}],
            "continue_final_message": True,
            "add_generation_prompt": True,
        },
        "add_generation_prompt",
    ),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"messages": [{"role": "assistant", "content": "x", "refusal": "no"}]}, "messages[0].refusal"),
    ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content"),
]


@pytest.mark.parametrize(
    ("path", "base", "cases"),
    [("completions", TEXT, BOTH + ONLY_TEXT), ("chat/completions", CHAT, BOTH + ONLY_CHAT)],
)
async def test_every_invalid_value_is_refused_by_name(
    world: World, table: TokenTable, path: str, base: dict[str, Any], cases: list[tuple[dict[str, Any], str]]
) -> None:
    async with asking(world, table) as (_, verifier, front):
        wrong = {}
        for fields, param in cases:
            body = json.dumps(base | fields).encode()
            status, said, _ = await asyncio.to_thread(send, front.http, f"/v1/{path}", body)
            error = said["error"]
            named = error["param"] or ""
            if (status, error["type"]) != (400, "invalid_request_error") or not named.startswith(param):
                wrong[str(fields)[:100]] = (status, error)
    assert not wrong
    assert not verifier.opened, "nothing was begun"
    assert front.sample("request_errors_total", reason="InvalidRequest") + front.sample(
        "request_errors_total", reason="FieldRefused"
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stop_token_ids": [96]}, "stop_token_ids has 96; ids are below 96"),
        ({"speculation": {"nodes": 257}}, "speculation.nodes is 257; 0 to 256 are possible"),
    ],
)
async def test_a_message_calls_a_field_what_the_body_calls_it(
    world: World, table: TokenTable, fields: dict[str, Any], message: str
) -> None:
    async with asking(world, table) as (_, _, front):
        body = json.dumps(TEXT | fields).encode()
        _, said, _ = await asyncio.to_thread(send, front.http, "/v1/completions", body)
    assert said["error"]["message"] == message


async def test_a_body_of_more_choices_than_can_run_at_once_is_no_reason_to_come_back(
    world: World, table: TokenTable
) -> None:
    async with asking(world, table) as (_, verifier, front):
        body = json.dumps({"prompt": ["ab"] * 3, "n": 3, "max_tokens": 2}).encode()
        status, said, _ = await asyncio.to_thread(send, front.http, "/v1/completions", body)
        error = said["error"]
        assert (status, error["param"]) == (400, "prompt")
        assert error["message"].startswith(
            "prompt has 3 prompts and n is 3, 9 choices; the verifiers of model"
        )
        assert error["message"].endswith("decode 8 at once: send fewer prompts in one body")
        assert not verifier.opened


async def test_a_body_of_more_choices_than_one_verifier_decodes_names_n(
    world: World, table: TokenTable
) -> None:
    verifiers = [await world.verifier(tokens=table), await world.verifier(tokens=table)]
    addresses = [verifier.address for verifier in verifiers]
    front = await world.ready(await world.front(addresses, http_bind="127.0.0.1:0"))
    body = json.dumps(TEXT | {"n": 9}).encode()
    status, said, _ = await asyncio.to_thread(send, front.http, "/v1/completions", body)
    assert (status, said["error"]["param"]) == (400, "n")
    assert not any(verifier.opened for verifier in verifiers)


def test_a_refusal_names_the_field_as_the_body_calls_it() -> None:
    assert param_of("stop_ids has 99; ids are below 96") == "stop_token_ids"
    assert param_of("speculation.node_limit is 300; 0 to 256 are possible") == "speculation.nodes"
    assert param_of("temperature is 101; it must be a number from 0 to 100") == "temperature"
    assert param_of("an id in stop_ids is -1; it must be 0 or more") == "stop_token_ids"
    assert param_of("something else") is None


@pytest.mark.parametrize(
    "words", ["stop_ids", "sources", "corpora", "a stop string", "logit_bias", "the prompt"]
)
def test_what_a_client_wrote_is_not_taken_for_a_field_and_is_quoted_as_it_is(words: str) -> None:
    for field in ("sources", "corpora"):
        _, body, _ = describe_error(InvalidRequest(f"speculation.{field} names {words!r}, but is not to"))
        assert body["error"]["param"] == f"speculation.{field}"
        assert repr(words) in body["error"]["message"]


@pytest.mark.parametrize("fields", [{"stop_ids": [1]}, {"speculation": {"node_limit": 4}}])
async def test_a_field_that_only_the_other_front_has_is_refused_under_its_own_name(
    world: World, table: TokenTable, fields: dict[str, Any]
) -> None:
    async with asking(world, table) as (_, _, front):
        body = json.dumps(TEXT | fields).encode()
        status, said, _ = await asyncio.to_thread(send, front.http, "/v1/completions", body)
    assert status == 400
    assert said["error"]["message"].startswith(f"{said['error']['param']} is not supported here")
    assert said["error"]["param"] in ("stop_ids", "speculation.node_limit")
