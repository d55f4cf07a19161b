"""What the HTTP front refuses, and how: OpenAI's shape, the field's name, no 422, nothing that hangs."""

import asyncio
import contextlib
import http.client
import json
import random
from typing import Any

import openai
import pytest

from orchestrator.front.http.bodies import arriving
from orchestrator.front.http.connections.protocol import BoundedProtocol
from orchestrator.front.http.errors import describe_error, param_of
from outrider.tokens import TokenTable
from speculative.errors import InvalidRequest, Overloaded
from tests.orchestrator.conftest import World
from tests.orchestrator.front.test_http_completions import HI, asking
from tests.orchestrator.fronts import connected


def send(
    url: str, path: str, body: bytes, method: str = "POST", **headers: str
) -> tuple[int, dict[str, Any], dict[str, str]]:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=100)
    with contextlib.closing(connection):
        connection.request(method, path, body, {"content-type": "application/json", **headers})
        response = connection.getresponse()
        return response.status, json.loads(response.read()), dict(response.getheaders())


TEXT: dict[str, Any] = {"model": "toy", "prompt": "abc", "max_tokens": 4}
CHAT: dict[str, Any] = {"model": "toy", "messages": HI, "max_tokens": 4}
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


async def test_a_body_that_is_no_object_names_no_field(world: World, table: TokenTable) -> None:
    async with asking(world, table) as (_, _, front):
        for body in (b"{", b"[]", b"", b"\xff"):
            status, said, _ = await asyncio.to_thread(send, front.http, "/v1/completions", body)
            assert (status, said["error"]["param"]) == (400, None), body


ODD: list[Any] = [None, True, 0, -1, 1.5, 1e308, 2**63, "", "x", "\u0000", [], [0], ["x"], [[]], [None], {}]
ODD += [{"type": "text"}, {"enabled": False}, {"0": 1}, {"include_usage": True}, {"\u0000": None}]


async def test_whatever_a_body_holds_it_is_answered_or_refused(world: World, table: TokenTable) -> None:
    chosen = random.Random(5)
    async with asking(world, table) as (_, _, front):
        for path, base in (("completions", TEXT), ("chat/completions", CHAT)):
            _, described, _ = await asyncio.to_thread(send, front.http, "/openapi.json", b"", "GET")
            kind = "CompletionRequest" if base is TEXT else "ChatRequest"
            names = sorted(described["components"]["schemas"][kind]["properties"])
            for _ in range(150):
                odd = {name: chosen.choice(ODD) for name in chosen.sample(names, 2) if name != "stream"}
                body = json.dumps(base | odd).encode()
                status, said, _ = await asyncio.to_thread(send, front.http, f"/v1/{path}", body)
                assert status in (200, 400, 404), (odd, said)
                assert status == 200 or said["error"]["param"], (odd, said)


NO_BODIES = [
    (b"{", 400),
    (b"", 400),
    (b"[1]", 400),
    (b'"x"', 400),
    (b"\xff\xfe", 400),
    (b'{"prompt": "\xff"}', 400),
    (b'{"prompt": "\\ud800"}', 400),
    (b'{"prompt": "a", "temperature": NaN}', 400),
    (b'{"prompt": "a", "user": -Infinity}', 400),
    (b'{"prompt": "a", "speculation": {"criterion": {"bild": {"delta": 2, "delta": 9}}}}', 400),
    (b'{"prompt": "a", "temperature": 0, "temperature": 1}', 400),
    (b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}", 400),
    (b"[" * 100_000, 400),
    (b'{"prompt": "' + b"x" * 2**20 + b'"}', 413),
    (b"null", 400),
    (b'{"prompt": "a", "m\\u00f6del\\n": 1}', 400),
]


async def test_a_body_that_is_none_is_refused(world: World, table: TokenTable) -> None:
    async with asking(world, table, {"max_message_mb": 1}) as (_, _, front):
        for body, status in NO_BODIES:
            for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
                got, said, _ = await asyncio.to_thread(send, front.http, path, body)
                assert (got, set(said["error"])) == (status, {"message", "type", "param", "code"}), said


async def test_unknown_models_paths_and_methods_have_the_shape_too(world: World, table: TokenTable) -> None:
    async with asking(world, table) as (client, _, front):
        with pytest.raises(openai.NotFoundError, match="no model 'other'") as refused:
            await client.completions.create(model="other", prompt="abc")
        assert (refused.value.param, refused.value.code) == ("model", "model_not_found")
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("other")
        with pytest.raises(openai.NotFoundError):
            await client.embeddings.create(model="toy", input="x")
        status, said, _ = await asyncio.to_thread(send, front.http, "/v1/completions", b"", "GET")
        assert (status, said["error"]["type"]) == (405, "invalid_request_error")


async def test_a_full_front_says_when_to_come_back(world: World, table: TokenTable) -> None:
    async with asking(world, table, {"max_streams": 1}, per_tick=0) as (client, _, front):
        waits = asyncio.create_task(client.completions.create(model="toy", prompt="abc", stream=True))
        await world.until(lambda: front.sample("requests") == 1)
        with pytest.raises(openai.RateLimitError) as refused:
            await client.completions.create(model="toy", prompt="abc")
        waits.cancel()
        await asyncio.wait((waits,))
        assert float(refused.value.response.headers["retry-after"]) == 1
        await world.until(lambda: front.sample("requests") == 0)


async def test_what_a_verifier_refuses_is_told_before_the_stream_begins(
    world: World, table: TokenTable
) -> None:
    async with asking(world, table, refusal=Overloaded("no room", 2.5)) as (client, _, _):
        with pytest.raises(openai.RateLimitError, match="no room"):
            await client.completions.create(model="toy", prompt="abc", stream=True)


async def test_without_a_verifier_the_front_is_not_healthy(world: World) -> None:
    front = await world.front(["127.0.0.1:1"], http_bind="127.0.0.1:0")
    status, said, _ = await asyncio.to_thread(send, front.http, "/health", b"", "GET")
    assert (status, said["error"]["code"]) == (503, "unavailable")
    status, said, _ = await asyncio.to_thread(send, front.http, "/v1/completions", b'{"prompt": "a"}')
    assert (status, said["error"]["type"]) == (503, "service_unavailable_error")
    assert "127.0.0.1" not in said["error"]["message"], "/fleet hides where verifiers are, too"


async def test_a_lost_stream_ends_in_an_error(world: World, table: TokenTable) -> None:
    async with asking(world, table, {"recover_s": 0.2}, per_tick=1, tick_s=0.02) as (client, verifier, _):
        stream = await client.completions.create(model="toy", prompt="abc", max_tokens=50, stream=True)
        events = aiter(stream)
        await anext(events)
        await verifier.server.stop(0)
        with pytest.raises(openai.APIError, match="lost its verifier") as lost:
            async for _ in events:
                pass
        assert "127.0.0.1" not in str(lost.value)


async def test_a_session_that_fails_ends_in_an_error(world: World, table: TokenTable) -> None:
    from outrider.v1 import common_pb2, verifier_pb2

    fault = verifier_pb2.Committed(
        position=3, finished=common_pb2.FINISH_REASON_ERROR, message="it broke", code=13
    )
    async with asking(world, table, fault=fault) as (client, _, _):
        with pytest.raises(openai.InternalServerError, match="it broke"):
            await client.completions.create(model="toy", prompt="abc")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_grammar_that_leads_nowhere_is_the_clients_fault(
    world: World, table: TokenTable, stream: bool
) -> None:
    from outrider.v1 import common_pb2, verifier_pb2
    from outrider.wire.codec import CommittedCode

    fault = verifier_pb2.Committed(
        position=3,
        finished=common_pb2.FINISH_REASON_ERROR,
        message="the grammar cannot go on: too many states",
        code=CommittedCode.DEAD_END,
    )
    async with asking(world, table, fault=fault) as (client, _, _):

        async def ask() -> None:
            answer = await client.completions.create(model="toy", prompt="abc", stream=stream)
            async for _ in answer:
                pass

        with pytest.raises(openai.APIError, match="too many states") as refused:
            await ask()
    assert refused.value.type == "invalid_request_error"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_cancels(world: World, table: TokenTable, stream: bool) -> None:
    async with asking(world, table, per_tick=0) as (client, verifier, front):
        asked = asyncio.create_task(
            client.completions.create(model="toy", prompt=["abc", "ab"], stream=stream, n=2)
        )
        await world.until(lambda: len(verifier.opened) == 4)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await world.until(lambda: len(verifier.cancelled) == 4)
        await world.until(lambda: front.sample("requests") == 0)


async def test_an_orchestrator_that_stops_tells_its_streams(world: World, table: TokenTable) -> None:
    async with asking(world, table, per_tick=1, tick_s=0.02) as (client, _, front):
        stream = await client.completions.create(model="toy", prompt="abc", max_tokens=60, stream=True)
        events = aiter(stream)
        await anext(events)
        stopping = asyncio.create_task(front.service.stop(0.1))
        with pytest.raises(openai.APIError, match="stopping"):
            async for _ in events:
                pass
        await stopping


async def test_headers_that_do_not_end_end_the_connection(
    world: World, table: TokenTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BoundedProtocol, "sending_s", 0.1)
    async with (
        asking(world, table) as (_, _, front),
        connected(front.http) as (reader, writer),
    ):
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n")
        async with asyncio.timeout(60):
            assert await reader.read() == b""


async def test_a_body_that_does_not_end_is_refused(
    world: World, table: TokenTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arriving, "SENDING_S", 0.1)
    async with (
        asking(world, table) as (_, _, front),
        connected(front.http) as (reader, writer),
    ):
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        writer.write(head + b"content-length: 100\r\n\r\n{")
        async with asyncio.timeout(60):
            assert (await reader.readline()).startswith(b"HTTP/1.1 408")


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
