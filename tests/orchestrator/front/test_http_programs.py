"""What ordinary OpenAI programs do, with the openai client; the verifier's model is arithmetic."""

import asyncio
import json
from typing import Any

import httpx2
import openai
import pytest

from orchestrator.front.http.event_stream import EventStream
from outrider.tokens import TokenTable
from tests.orchestrator.conftest import MAX_LENGTH, World
from tests.orchestrator.front.sending import send
from tests.orchestrator.front.test_http_completions import HI, asking, expected

IGNORED: dict[str, Any] = {
    "user": "me",
    "metadata": {"run": "7"},
    "store": True,
    "service_tier": "auto",
    "safety_identifier": "me",
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
}


async def test_an_answer_can_be_appended_to_the_conversation_again_and_again(
    world: World, table: TokenTable
) -> None:
    async with asking(world, table) as (client, verifier, _):
        messages: list[Any] = [{"role": "user", "content": "a"}]
        for _ in range(3):
            answer = await client.chat.completions.create(model="toy", messages=messages, max_tokens=3)
            messages.append(answer.choices[0].message)
            messages.append({"role": "user", "content": "b"})
    said = [expected(table, len(opened.ids), 3)[1] for opened in verifier.opened]
    last = b"".join(map(table.token_bytes, verifier.opened[2].ids)).decode()
    assert last == f"user:a|assistant:{said[0]}|user:b|assistant:{said[1]}|user:b|a:"


async def test_what_the_openai_client_parses_of_an_answer_comes_back_unread(
    world: World, table: TokenTable
) -> None:
    function = {"name": "f", "arguments": "{}", "parsed_arguments": {"a": 1}}
    turn: Any = {"role": "assistant", "content": "c", "parsed": {"b": 2}}
    turn["tool_calls"] = [{"id": "c", "type": "function", "function": function}]
    chat = (
        "{% set m = messages[0] %}{{ m.parsed }}{{ m.tool_calls[0].function.parsed_arguments }}{{ m.role }}"
    )
    async with asking(world, table, chat=chat) as (client, verifier, _):
        await client.chat.completions.create(model="toy", messages=[turn], max_tokens=1)
    assert list(verifier.opened[0].ids) == table.encode("assistant")


async def test_fields_that_cannot_change_the_text_do_not(world: World, table: TokenTable) -> None:
    async with asking(world, table) as (client, verifier, _):
        plain = await client.chat.completions.create(model="toy", messages=HI, max_tokens=4, seed=1)
        parallel: dict[str, Any] = {"parallel_tool_calls": True, "tools": [], "tool_choice": None}
        sent = await client.chat.completions.create(
            model="toy", messages=HI, max_tokens=4, seed=1, extra_body=IGNORED | parallel
        )
        text = await client.completions.create(model="toy", prompt="a", max_tokens=1, extra_body=IGNORED)
    assert sent.choices == plain.choices
    assert text.choices[0].finish_reason == "length"
    first, second = verifier.opened[:2]
    assert (first.ids, first.sampling) == (second.ids, second.sampling)


async def test_each_event_can_have_the_usage_so_far(world: World, table: TokenTable) -> None:
    async with asking(world, table) as (client, _, _):
        events = [
            event
            async for event in await client.chat.completions.create(
                model="toy",
                messages=HI,
                max_tokens=6,
                stream=True,
                extra_body={
                    "stream_options": {
                        "include_usage": True,
                        "continuous_usage_stats": True,
                        "include_obfuscation": False,
                    }
                },
            )
        ]
    counts = [event.usage.completion_tokens for event in events if event.usage is not None]
    assert len(counts) == len(events)
    assert counts == sorted(counts)
    assert counts[-1] == 6
    assert counts[0] < 6


async def test_the_first_event_has_the_role_and_the_first_text(world: World, table: TokenTable) -> None:
    async with asking(world, table) as (client, _, _):
        stream = await client.chat.completions.create(
            model="toy", messages=HI, max_tokens=6, n=2, stream=True
        )
        events = [choice async for event in stream for choice in event.choices]
    for index in (0, 1):
        roles = [choice.delta.role for choice in events if choice.index == index]
        assert roles[0] == "assistant"
        assert not any(roles[1:])
        assert next(choice for choice in events if choice.index == index).delta.content


async def test_usage_says_what_was_cached_and_what_the_prediction_gave(
    world: World, table: TokenTable
) -> None:
    async with asking(world, table, cached=7, drafts=True) as (client, _, _):
        answer = await client.chat.completions.create(
            model="toy",
            messages=HI,
            max_tokens=6,
            prediction={"type": "content", "content": "def"},
            extra_body={"speculation": {"sources": ["prediction"]}},
        )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 7
    details = answer.usage.completion_tokens_details
    assert details is not None
    accepted = details.accepted_prediction_tokens
    assert accepted
    assert details.rejected_prediction_tokens == 6 - accepted


@pytest.mark.parametrize(
    "thoughts",
    [{"reasoning_content": "hm"}, {"reasoning": "hm"}, {"reasoning_content": "hm", "reasoning": "other"}],
)
async def test_reasoning_of_earlier_turns_comes_by_either_name(
    world: World, table: TokenTable, thoughts: dict[str, str]
) -> None:
    turn: Any = {"role": "assistant", "content": "c", **thoughts}
    chat = "{% for m in messages %}{{ m.reasoning_content }}{{ m.reasoning }}{{ m.content }}{% endfor %}"
    async with asking(world, table, chat=chat) as (client, verifier, _):
        await client.chat.completions.create(model="toy", messages=[turn], max_tokens=1)
    assert list(verifier.opened[0].ids) == table.encode("hmc")


async def test_usage_counts_reasoning_apart(world: World, table: TokenTable) -> None:
    async with asking(world, table, chat="{{ messages | length }}</think><think>") as (client, _, _):
        answer = await client.chat.completions.create(model="toy", messages=HI, max_tokens=6)
        stream = await client.chat.completions.create(
            model="toy", messages=HI, max_tokens=6, stream=True, stream_options={"include_usage": True}
        )
        usages = [event.usage async for event in stream if event.usage is not None]
    for usage in (answer.usage, usages[-1]):
        assert usage is not None
        assert usage.completion_tokens_details is not None
        assert usage.completion_tokens_details.reasoning_tokens == usage.completion_tokens == 6


def with_special_marks(table: TokenTable, end: int) -> TokenTable:
    """The tokenizer with the marks around reasoning as special tokens.

    Args:
        end: the id of the end mark.
    """
    described = json.loads(table.to_json())
    begin = 95
    renamed = {begin: "<think>", end: "</think>"}
    vocabulary = described["model"]["vocab"]
    described["model"]["vocab"] = {renamed.get(id_, token): id_ for token, id_ in vocabulary.items()}
    described["added_tokens"] += [
        described["added_tokens"][0] | {"id": id_, "content": mark} for id_, mark in sorted(renamed.items())
    ]
    return TokenTable.from_json(json.dumps(described))


async def test_reasoning_ends_at_its_mark_where_the_mark_is_a_special_token(
    world: World, table: TokenTable
) -> None:
    ids, _ = expected(table, 2, 8)
    marked = with_special_marks(table, end=ids[3])
    thought, content = (b"".join(map(table.token_bytes, part)).decode() for part in (ids[:3], ids[4:]))
    chat = "{{ messages | length }}<think>{# </think> <tool_call> </tool_call> arguments #}"
    tool: Any = {"type": "function", "function": {"name": "f"}}
    async with asking(world, marked, chat=chat) as (client, verifier, _):
        answer = await client.chat.completions.create(model="toy", messages=HI, max_tokens=8)
        stream = await client.chat.completions.create(model="toy", messages=HI, max_tokens=8, stream=True)
        deltas = [event.choices[0].delta async for event in stream]
        other = await client.responses.create(model="toy", input="hi", max_output_tokens=8)
        await client.chat.completions.create(
            model="toy", messages=HI, max_tokens=8, tools=[tool], tool_choice="required"
        )
        formed = await client.chat.completions.create(
            model="toy", messages=HI, max_tokens=8, response_format={"type": "json_object"}
        )
    message = answer.choices[0].message
    assert (message.content, message.model_extra) == (content, {"reasoning_content": thought})
    assert "".join(delta.content or "" for delta in deltas) == other.output_text == content
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == 4
    assert f"<[{ids[3]}]>" in verifier.opened[-2].grammar.lark
    assert verifier.opened[-1].grammar.json_object
    assert f"<[{ids[3]}]>" in verifier.opened[-1].grammar.preamble
    assert formed.choices[0].message == message


async def test_answers_are_parsed_by_the_checkpoint_s_response_template(
    world: World, table: TokenTable
) -> None:
    text = expected(table, 1, 12)[1]
    marks = {"open": text[3:5], "close": text[8:10]}
    response = {"start_anchor": "1", "fields": {"reasoning_content": marks, "content": {}}}
    template = {"chat": "{{ messages | length }}", "response": json.dumps(response)}
    async with asking(world, table, **template) as (client, _, _):
        answer = await client.chat.completions.create(model="toy", messages=HI, max_tokens=12)
        stream = await client.chat.completions.create(model="toy", messages=HI, max_tokens=12, stream=True)
        deltas = [event.choices[0].delta async for event in stream]
        other = await client.responses.create(model="toy", input="hi", max_output_tokens=12)
    message = answer.choices[0].message
    assert (message.content, message.model_extra) == (
        text[:3] + text[10:],
        {"reasoning_content": text[5:8]},
    )
    assert "".join(delta.content or "" for delta in deltas) == message.content == other.output_text
    thoughts = [(delta.model_extra or {}).get("reasoning_content", "") for delta in deltas]
    assert "".join(thoughts) == text[5:8]


async def test_chat_goes_on_to_the_end_of_the_context(world: World, table: TokenTable) -> None:
    async with asking(world, table) as (client, verifier, _):
        answer = await client.chat.completions.create(model="toy", messages=HI)
    assert verifier.opened[0].limit == MAX_LENGTH
    assert answer.usage is not None
    assert answer.usage.total_tokens == MAX_LENGTH


async def test_the_server_can_bound_chat(world: World, table: TokenTable) -> None:
    async with asking(world, table, {"chat_max_tokens": 5}) as (client, verifier, _):
        await client.chat.completions.create(model="toy", messages=HI)
    assert verifier.opened[0].limit == len(verifier.opened[0].ids) + 5


SAMPLES = {"temperature": 0.6, "top_k": 20, "top_p": 0.9}


async def test_requests_sample_as_the_generation_config_says(world: World, table: TokenTable) -> None:
    async with asking(world, table, samples=SAMPLES) as (client, verifier, front):
        await client.completions.create(model="toy", prompt="a", max_tokens=1, top_p=0.5)
        await front.client.generate("a", max_tokens=1)
    asked, over_grpc = (opened.sampling for opened in verifier.opened)
    assert (asked.temperature, asked.top_k, asked.top_p) == (0.6, 20, 0.5)
    assert not over_grpc.HasField("temperature")


async def test_the_generation_config_can_be_switched_off(world: World, table: TokenTable) -> None:
    async with asking(world, table, {"generation_config": "none"}, samples=SAMPLES) as (client, verifier, _):
        await client.completions.create(model="toy", prompt="a", max_tokens=1)
    assert not verifier.opened[0].sampling.ListFields()


async def test_an_echo_begins_with_the_prompt(world: World, table: TokenTable) -> None:
    async with asking(world, table) as (client, verifier, _):
        given = await client.completions.create(model="toy", prompt="abc", max_tokens=4, n=2, echo=True)
        ids: list[int] = table.encode("abc")
        stream = await client.completions.create(
            model="toy", prompt=ids, max_tokens=4, echo=True, stream=True
        )
        streamed = "".join([choice.text async for event in stream for choice in event.choices])
    text = "abc" + expected(table, 3, 4)[1]
    assert [choice.text for choice in given.choices] == [text, text]
    assert streamed == text
    assert given.usage is not None
    assert given.usage.completion_tokens == 8
    assert not any(opened.score_prompt for opened in verifier.opened)


async def test_an_echo_with_log_probabilities_has_those_of_the_prompt(
    world: World, table: TokenTable
) -> None:
    async with asking(world, table) as (client, verifier, _):
        answer = await client.completions.create(
            model="toy", prompt="abcdef", max_tokens=2, echo=True, logprobs=1
        )
    (opened,) = verifier.opened
    assert opened.score_prompt
    assert not opened.speculate
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == [*"abcdef", *(table.token(id_) for id_ in expected(table, 6, 2)[0])]
    assert logprobs.token_logprobs == [None, *[-0.5] * 7]
    assert logprobs.top_logprobs is not None
    assert logprobs.top_logprobs[0] is None
    assert logprobs.text_offset == list(range(8))
    assert answer.choices[0].text == "abcdef" + expected(table, 6, 2)[1]


@pytest.mark.parametrize("prompt", ["abc", "a"])
async def test_a_prompt_can_be_scored_without_a_token_behind_it(
    world: World, table: TokenTable, prompt: str
) -> None:
    async with asking(world, table) as (client, _, _):
        stream = await client.completions.create(
            model="toy", prompt=prompt, max_tokens=0, echo=True, logprobs=0, stream=True
        )
        choices = [choice async for event in stream for choice in event.choices]
    assert "".join(choice.text for choice in choices) == prompt
    tokens = [token for choice in choices if choice.logprobs for token in choice.logprobs.tokens or ()]
    assert tokens == [*prompt]
    assert choices[-1].finish_reason == "length"


async def test_a_score_survives_the_loss_of_its_verifier(world: World, table: TokenTable) -> None:
    first = await world.verifier(tokens=table, per_tick=2, tick_s=0.05)
    front = await world.front([first.address], http_bind="127.0.0.1:0")
    await world.ready(front)
    async with openai.AsyncOpenAI(base_url=f"{front.http}/v1", api_key="any", max_retries=0) as client:
        stream = await client.completions.create(
            model="toy", prompt="abcdefghij", max_tokens=2, echo=True, logprobs=0, stream=True
        )
        events = aiter(stream)
        choices = [(await anext(events)).choices[0]]
        first.sessions.clear()  # it has lost the session, as after a start
        choices += [choice async for event in events for choice in event.choices]
    tokens = [token for choice in choices if choice.logprobs for token in choice.logprobs.tokens or ()]
    assert len(first.opened) == 2
    assert tokens == [*"abcdefghij", *(table.token(id_) for id_ in expected(table, 10, 2)[0])]


@pytest.mark.parametrize("room", [0, 70_000])
async def test_an_echo_beside_a_suffix_is_refused_by_whoever_reads_the_body(
    world: World, table: TokenTable, room: int
) -> None:
    async with asking(world, table) as (_, verifier, front):
        body = b'{"prompt": "a", "suffix": "b", "echo": true%s}' % (b" " * room)
        status, said, _ = await asyncio.to_thread(send, front.http, "/v1/completions", body)
    assert (status, said["error"]["message"]) == (400, "echo is given beside suffix; give one of them")
    assert not verifier.opened


async def test_pages_of_other_origins_are_refused(world: World, table: TokenTable) -> None:
    async with asking(world, table) as (_, verifier, front):
        body = b'{"prompt": "a", "max_tokens": 1}'
        status, said, _ = await asyncio.to_thread(
            send, front.http, "/v1/completions", body, origin="https://evil.example"
        )
        rebound, _, _ = await asyncio.to_thread(
            send, front.http, "/v1/completions", body, origin="http://evil.example:80", host="evil.example:80"
        )
        broken, _, _ = await asyncio.to_thread(
            send, front.http, "/v1/completions", body, origin="http://[", host="["
        )
        own, _, _ = await asyncio.to_thread(send, front.http, "/v1/completions", body, origin=front.http)
    assert (status, said["error"]["code"]) == (403, "permission_denied")
    assert "--http-origins" in said["error"]["message"]
    assert rebound == 403, "its owner has the name stand for this machine"
    assert broken == 403
    assert own == 200
    assert len(verifier.opened) == 1


async def test_pages_of_allowed_origins_may_call(world: World, table: TokenTable) -> None:
    origin = "https://chat.example"
    async with (
        asking(world, table, {"http_origins": origin}) as (_, _, front),
        httpx2.AsyncClient() as client,
    ):
        asks = {"origin": origin, "access-control-request-method": "POST"}
        asks["access-control-request-headers"] = "authorization, x-stainless-lang"
        before = await client.options(f"{front.http}/v1/completions", headers=asks)
        wrong = await client.post(f"{front.http}/v1/completions", json={}, headers={"origin": origin})
        evil = await client.options(
            f"{front.http}/v1/completions", headers=asks | {"origin": "https://evil.example"}
        )
    assert before.status_code == 200
    assert before.headers["access-control-allow-origin"] == origin
    assert "x-stainless-lang" in before.headers["access-control-allow-headers"]
    assert (wrong.status_code, wrong.headers["access-control-allow-origin"]) == (400, origin)
    assert "x-request-id" in wrong.headers["access-control-expose-headers"]
    assert evil.status_code == 403


async def test_the_reference_loads_nothing_from_elsewhere(world: World, table: TokenTable) -> None:
    async with asking(world, table) as (_, _, front), httpx2.AsyncClient() as client:
        page = await client.get(f"{front.http}/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "POST /v1/chat/completions" in page.text
    assert "stream_options.include_usage" in page.text
    assert "<script" not in page.text
    assert "http" not in page.text.replace("http</code>", "")


async def test_the_client_sees_the_request_id(world: World, table: TokenTable) -> None:
    async with asking(world, table) as (client, _, _):
        drawn = await client.completions.create(model="toy", prompt="a", max_tokens=1)
        chosen = await client.completions.create(
            model="toy", prompt="a", max_tokens=1, extra_headers={"x-request-id": "mine-7"}
        )
        with pytest.raises(openai.BadRequestError) as refused:
            await client.completions.create(model="toy", prompt="", max_tokens=1)
    assert drawn._request_id
    assert chosen._request_id == "mine-7"
    assert refused.value.request_id


async def test_every_line_of_a_stream_is_a_whole_event_to_whoever_splits_it(
    world: World, table: TokenTable
) -> None:
    text = "a\u2028b\u2029c\x85d\x1ee\u00e9"  # line ends of Python's splitlines, and no line end
    body = {"model": "toy", "prompt": text, "max_tokens": 2, "echo": True, "stream": True}
    async with (
        asking(world, table) as (_, _, front),
        httpx2.AsyncClient() as client,
        client.stream("POST", f"{front.http}/v1/completions", json=body) as response,
    ):
        lines = [line async for line in response.aiter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert "".join(event["choices"][0]["text"] for event in events).startswith(text)
    assert any("\u00e9" in line for line in lines), "other characters stay as they are"


async def test_a_silent_stream_sends_comments() -> None:
    sent: list[bytes] = []

    async def send(message: Any) -> None:
        sent.append(message.get("body", b"start"))

    async with EventStream(send, silence_s=0.01) as stream:
        async with asyncio.timeout(60):
            while not stream.begun:  # noqa: ASYNC110  # the stream's own timer begins it
                await asyncio.sleep(0.01)
        await stream.send(b"{}")
        await stream.end()
    assert sent[:2] == [b"start", b": waiting\n\n"]
    assert sent[-2:] == [b"data: {}\n\n", b""]
    count = len(sent)
    await asyncio.sleep(0.03)
    assert len(sent) == count, "nothing is sent after the end"
