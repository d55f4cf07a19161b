"""Completions over HTTP, as the openai client asks for them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from orchestrator.front.http.accumulator import Piece
from orchestrator.front.http.openai_format import TextCompletionFormat
from outrider.tokens import TokenTable
from outrider.v1 import common_pb2
from tests.orchestrator.conftest import MAX_LENGTH, FakeVerifier, Front, World, next_id

PLAIN = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}|{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
HI = [{"role": "user", "content": "hi"}]


@asynccontextmanager
async def asking(
    world: World, table: TokenTable, settings: dict[str, Any] | None = None, **how: Any
) -> AsyncIterator[tuple[openai.AsyncOpenAI, FakeVerifier, Front]]:
    verifier = await world.verifier(**{"tokens": table, "chat": PLAIN, **how})
    front = await world.front([verifier.address], http_bind="127.0.0.1:0", **(settings or {}))
    await world.ready(front)
    async with openai.AsyncOpenAI(base_url=f"{front.http}/v1", api_key="any", max_retries=0) as client:
        yield client, verifier, front


def expected(table: TokenTable, prompt: int, count: int) -> tuple[list[int], str]:
    ids = [next_id(position) for position in range(prompt, prompt + count)]
    return ids, b"".join(map(table.token_bytes, ids)).decode()


async def test_a_text_is_gone_on_with(world: World, table: TokenTable) -> None:
    async with asking(world, table) as (client, verifier, front):
        answer = await client.completions.create(
            model="toy", prompt="abc", max_tokens=6, seed=7, extra_body={"return_token_ids": True}
        )
    ids, text = expected(table, 3, 6)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.index) == (text, "length", 0)
    assert choice.model_extra == {"token_ids": ids, "prompt_token_ids": table.encode("abc")}
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (
        3,
        6,
        9,
    )
    assert answer.model_extra == {"seed": 7}
    assert verifier.opened[0].seed == 7
    assert verifier.opened[0].key.tenant == "default"
    assert front.sample("request_success_total", finished_reason="length") == 1


async def test_a_stream_has_an_event_for_each_round_and_the_usage_last(
    world: World, table: TokenTable
) -> None:
    async with asking(world, table) as (client, _, _):
        stream = await client.completions.create(
            model="toy", prompt="abc", max_tokens=20, stream=True, stream_options={"include_usage": True}
        )
        events = [event async for event in stream]
    text = "".join(choice.text for event in events for choice in event.choices)
    assert text == expected(table, 3, 20)[1]
    assert [choice.finish_reason for event in events for choice in event.choices][-1] == "length"
    assert len(events) < 15, "several ids an event"
    assert events[-1].choices == []
    assert events[-1].usage is not None
    assert events[-1].usage.completion_tokens == 20
    assert all(event.usage is None for event in events[:-1])


async def test_a_conversation_goes_through_the_template(world: World, table: TokenTable) -> None:
    async with asking(world, table) as (client, verifier, _):
        answer = await client.chat.completions.create(model="toy", messages=HI, max_completion_tokens=4)
    assert list(verifier.opened[0].ids) == table.encode("user:hi|a:")
    message = answer.choices[0].message
    assert (message.role, message.content) == ("assistant", expected(table, 10, 4)[1])
    assert answer.object == "chat.completion"


async def test_a_prompt_may_end_before_the_mark_of_an_answer(world: World, table: TokenTable) -> None:
    async with asking(world, table) as (client, verifier, _):
        for given in (False, True):
            await client.chat.completions.create(
                model="toy", messages=HI, max_tokens=1, extra_body={"add_generation_prompt": given}
            )
    assert [list(opened.ids) for opened in verifier.opened] == [
        table.encode("user:hi|"),
        table.encode("user:hi|a:"),
    ]


async def test_parts_of_a_message_are_joined(world: World, table: TokenTable) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    async with asking(world, table) as (client, verifier, _):
        await client.chat.completions.create(
            model="toy", messages=[{"role": "user", "content": parts}], max_tokens=1
        )
    assert list(verifier.opened[0].ids) == table.encode("user:a\nb|a:")


async def test_a_streamed_conversation_begins_with_the_role(world: World, table: TokenTable) -> None:
    async with (
        asking(world, table) as (client, _, _),
        client.chat.completions.stream(model="toy", messages=HI, max_tokens=6) as stream,
    ):
        events = [event.chunk async for event in stream if event.type == "chunk"]
        whole = stream.current_completion_snapshot
    assert events[0].choices[0].delta.role == "assistant"
    assert whole.choices[0].message.content == expected(table, 10, 6)[1]
    assert whole.choices[0].finish_reason == "length"


async def test_a_model_without_a_template_says_so(world: World, table: TokenTable) -> None:
    async with asking(world, table, chat="") as (client, _, _):
        with pytest.raises(openai.BadRequestError, match="has no chat template") as refused:
            await client.chat.completions.create(model="toy", messages=HI)
    assert refused.value.param == "messages"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ messages[9].content.x }}",
        "{% for",
    ],
)
async def test_a_template_that_fails_is_no_bug(world: World, table: TokenTable, template: str) -> None:
    async with asking(world, table, chat=template) as (client, _, _):
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="toy", messages=HI)
    assert refused.value.param == "messages"


PROMPTS: list[tuple[Any, list[int]]] = [
    ("ab", [2]),
    (["ab", "abc"], [2, 3]),
    ([5, 6, 7], [3]),
    ([[5, 6], [7]], [2, 1]),
]


@pytest.mark.parametrize(("prompt", "lengths"), PROMPTS)
async def test_prompts_are_texts_or_ids(
    world: World, table: TokenTable, prompt: Any, lengths: list[int]
) -> None:
    async with asking(world, table) as (client, _, front):
        answer = await client.completions.create(model="toy", prompt=prompt, max_tokens=3, n=2)
    wanted = [expected(table, length, 3)[1] for length in lengths for _ in range(2)]
    assert [choice.text for choice in answer.choices] == wanted
    assert [choice.index for choice in answer.choices] == list(range(len(wanted)))
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(lengths)
    assert front.sample("requests") == 0


async def test_log_probabilities_come_in_the_shape_of_completions(world: World, table: TokenTable) -> None:
    async with asking(world, table) as (client, _, _):
        answer = await client.completions.create(model="toy", prompt="abc", max_tokens=4, logprobs=2)
        stream = await client.completions.create(
            model="toy", prompt="abc", max_tokens=4, logprobs=2, stream=True
        )
        parts = [c.logprobs async for event in stream for c in event.choices if c.logprobs]
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    ids, _ = expected(table, 3, 4)
    assert logprobs.tokens == [table.token_bytes(id_).decode() for id_ in ids]
    assert logprobs.token_logprobs == [-0.5] * 4
    assert logprobs.text_offset == [0, 1, 2, 3]
    assert [offset for part in parts for offset in part.text_offset or []] == logprobs.text_offset
    likeliest = {table.token_bytes(2).decode(): -0.5, table.token_bytes(3).decode(): -0.75}
    assert logprobs.top_logprobs is not None
    assert all(likeliest.items() <= top.items() for top in logprobs.top_logprobs)


def test_a_special_token_amid_the_answer_moves_no_offset(table: TokenTable) -> None:
    logprobs = (common_pb2.TokenLogprob(logprob=-1.0),) * 3
    choice = TextCompletionFormat(table).whole(Piece(0, "xy", (5, 1, 6), logprobs, "length"))
    assert choice["logprobs"]["tokens"][1] == "<eos>"
    assert choice["logprobs"]["text_offset"] == [0, 1, 1]


async def test_an_end_id_that_is_an_ordinary_token_has_no_text(world: World, table: TokenTable) -> None:
    ids, _ = expected(table, 3, 4)
    asked: dict[str, Any] = {"model": "toy", "prompt": "abc", "max_tokens": 4}
    async with asking(world, table, eos_ids=(ids[-1],)) as (client, _, _):
        whole = await client.completions.create(**asked)
        stream = await client.completions.create(**asked, stream=True)
        parts = [choice.text async for event in stream for choice in event.choices]
        ignoring = await client.completions.create(**asked, extra_body={"ignore_eos": True})
    assert whole.choices[0].text == b"".join(map(table.token_bytes, ids[:-1])).decode()
    assert "".join(parts) == whole.choices[0].text
    assert ignoring.choices[0].text == b"".join(map(table.token_bytes, ids)).decode()


async def test_log_probabilities_come_in_the_shape_of_conversations(world: World, table: TokenTable) -> None:
    async with asking(world, table) as (client, _, _):
        answer = await client.chat.completions.create(
            model="toy", messages=HI, max_tokens=2, logprobs=True, top_logprobs=1
        )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    first = table.token_bytes(next_id(10))
    assert (logprobs.content[0].token, logprobs.content[0].bytes) == (first.decode(), list(first))
    assert [top.logprob for top in logprobs.content[0].top_logprobs] == [-0.5]


async def test_an_end_id_has_no_bytes_in_the_log_probabilities_of_a_conversation(
    world: World, table: TokenTable
) -> None:
    last, likely = next_id(11), 2
    asked: dict[str, Any] = {
        "model": "toy",
        "messages": HI,
        "max_tokens": 2,
        "logprobs": True,
        "top_logprobs": 1,
    }
    async with asking(world, table, eos_ids=(last, likely)) as (client, _, _):
        ended = await client.chat.completions.create(**asked)
        ignoring = await client.chat.completions.create(**asked, extra_body={"ignore_eos": True})
        stopping = await client.chat.completions.create(
            **asked, extra_body={"ignore_eos": True, "stop_token_ids": [last]}
        )
    found = [answer.choices[0].logprobs for answer in (ended, ignoring, stopping)]
    bytes_of = [[token.bytes for token in each.content or ()] for each in found if each is not None]
    first, end = list(table.token_bytes(next_id(10))), list(table.token_bytes(last))
    assert bytes_of == [[first, None], [first, end], [first, None]]
    tops = [each.content[1].top_logprobs[0] for each in found if each is not None and each.content]
    assert [top.bytes for top in tops] == [None, *[list(table.token_bytes(likely))] * 2]
    assert [top.token for top in tops] == [table.token_bytes(likely).decode()] * 3


async def test_every_parameter_reaches_the_verifier(world: World, table: TokenTable) -> None:
    extra = {
        "top_k": 5,
        "min_p": 0.25,
        "repetition_penalty": 1.5,
        "contrast_strength": 0.5,
        "contrast_plausibility": 0.25,
        "min_tokens": 2,
        "ignore_eos": True,
        "stop_token_ids": [9],
        "speculation": {"enabled": True, "sources": ["lookup"], "nodes": 4, "policy": "fixed:3"},
    }
    async with asking(world, table) as (client, verifier, _):
        await client.completions.create(
            model="toy",
            prompt="abc",
            max_tokens=4,
            temperature=0.5,
            top_p=0.75,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            logit_bias={"7": -3},
            stop=["zzz"],
            seed=-1,
            extra_body=extra,
        )
    opened = verifier.opened[0]
    sampling = opened.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.75, 5, 0.25)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
    assert (sampling.repetition_penalty, sampling.min_tokens, sampling.ignore_eos) == (1.5, 2, True)
    assert (sampling.contrast_strength, sampling.contrast_plausibility) == (0.5, 0.25)
    assert (dict(sampling.logit_bias), list(sampling.stop_ids)) == ({7: -3.0}, [9])
    assert (list(opened.stop), opened.seed, opened.limit) == (["zzz"], 2**64 - 1, 7)
    assert (opened.speculate, opened.node_limit, opened.policy) == (True, 4, "fixed:3")
    assert [source.name for source in opened.sources] == ["lookup"]


async def test_minus_one_is_no_cut(world: World, table: TokenTable) -> None:
    async with asking(world, table) as (client, verifier, _):
        await client.completions.create(model="toy", prompt="a", max_tokens=1, extra_body={"top_k": -1})
    assert verifier.opened[0].sampling.top_k == 0


async def test_forms_of_the_answer_reach_the_verifier(world: World, table: TokenTable) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    async with asking(world, table) as (client, verifier, _):
        for form in ({"type": "text"}, {"type": "json_object"}, named):
            await client.chat.completions.create(model="toy", messages=HI, max_tokens=1, response_format=form)
    kinds = [opened.grammar.WhichOneof("kind") for opened in verifier.opened]
    assert kinds == [None, "json_object", "json_schema"]


async def test_accepted_drafts_are_reported(world: World, table: TokenTable) -> None:
    async with asking(world, table, drafts=True) as (client, _, _):
        answer = await client.completions.create(
            model="toy",
            prompt="abc",
            max_tokens=8,
            extra_body={"per_request_spec_decode_metrics": "detailed"},
        )
    assert answer.usage is not None
    details = answer.usage.completion_tokens_details
    assert details is not None
    predicted = details.accepted_prediction_tokens, details.rejected_prediction_tokens
    assert predicted == (0, 0), "the client predicted nothing"
    accepted = 4
    assert answer.model_extra is not None
    metrics = answer.model_extra["metrics"]["speculative_decoding"]
    assert metrics["num_accepted_draft_tokens"] == accepted
    assert metrics["num_draft_tokens"] == 8
    assert sum(metrics["per_step_accepted"]) == accepted
    assert sum(metrics["acceptance_histogram"]) == metrics["num_spec_steps"]
    assert metrics["mean_acceptance_length"] == 1 + accepted / metrics["num_spec_steps"]


async def test_the_blocking_client_is_answered_too(world: World, table: TokenTable) -> None:
    async with asking(world, table) as (_, _, front):

        def ask() -> tuple[str, str, str]:
            with openai.OpenAI(base_url=f"{front.http}/v1", api_key="any", max_retries=0) as client:
                whole = client.completions.create(model="toy", prompt="abc", max_tokens=5)
                events = client.completions.create(model="toy", prompt="abc", max_tokens=5, stream=True)
                streamed = "".join(choice.text for event in events for choice in event.choices)
                chat = client.chat.completions.create(model="toy", messages=HI, max_tokens=5)
                return whole.choices[0].text, streamed, chat.choices[0].message.content or ""

        whole, streamed, chat = await asyncio.to_thread(ask)
    assert whole == streamed == expected(table, 3, 5)[1]
    assert chat == expected(table, 10, 5)[1]


async def test_max_tokens_has_the_default_of_the_server(world: World, table: TokenTable) -> None:
    async with asking(world, table, {"default_max_tokens": 5}) as (client, _, _):
        answer = await client.completions.create(model="toy", prompt="abc")
        most = await client.completions.create(model="toy", prompt="abc", max_tokens=MAX_LENGTH - 3)
    assert answer.usage is not None
    assert most.usage is not None
    assert (answer.usage.completion_tokens, most.usage.completion_tokens) == (5, MAX_LENGTH - 3)
