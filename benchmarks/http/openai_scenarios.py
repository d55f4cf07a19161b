"""Scenarios of programs that use the openai client, which the blocking and the asyncio client both play.

A scenario is a generator: it yields calls, gets the result of each (a stream as the list of its events, an
error as itself), and asserts. `play` and `play_async` drive a scenario; the tests play all scenarios, and
`outrider bench http` counts how many pass. They need a model with a chat template whose tokenizer writes any
text.
"""

import json
import re
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, cast

import openai
from pydantic import BaseModel

STREAM_HELPERS = {
    "chat.completions.stream": "get_final_completion",
    "responses.stream": "get_final_response",
}
"""Calls that collect a stream, with the method that returns what they collected."""
PROMPT = '{"name": "Ada", "age": 36'
HI = [{"role": "user", "content": "hi"}]
WORDS = {"structured_outputs": {"regex": "[a-z ]{40}"}}


@dataclass(frozen=True)
class Call:
    """One call of the client: the path of its attributes, and its arguments."""

    path: str
    arguments: dict[str, Any] = field(default_factory=dict)
    leave_after: int | None = None
    """Number of events after which a stream is closed; None: it is read to its end."""


Steps = Generator[Call, Any, None]
Scenario = Callable[[str], Steps]
SCENARIOS: dict[str, Scenario] = {}
"""All scenarios by name; each takes the model's name."""
ERRORS: list[type[Exception]] = [openai.OpenAIError]
"""Base classes of the errors that clients raise, which scenarios get as results."""


def scenario(function: Scenario) -> Scenario:
    """Adds a scenario to SCENARIOS."""
    SCENARIOS[function.__name__] = function
    return function


def play(client: Any, model: str, name: str, scenarios: Mapping[str, Scenario] = SCENARIOS) -> None:
    """Plays a scenario with a blocking client. Raises AssertionError where the scenario fails."""
    steps, result = scenarios[name](model), None
    while True:
        try:
            call = steps.send(result)
        except StopIteration:
            return
        try:
            result = _called(client, call)
        except tuple(ERRORS) as error:
            result = error


async def play_async(
    client: Any, model: str, name: str, scenarios: Mapping[str, Scenario] = SCENARIOS
) -> None:
    """Plays a scenario with an asyncio client. Raises AssertionError where the scenario fails."""
    steps, result = scenarios[name](model), None
    while True:
        try:
            call = steps.send(result)
        except StopIteration:
            return
        try:
            result = await _awaited(client, call)
        except tuple(ERRORS) as error:
            result = error


def _called(client: Any, call: Call) -> Any:
    made: Any = reduce(getattr, call.path.split("."), client)(**call.arguments)
    if helper := STREAM_HELPERS.get(call.path):
        with made as stream:
            return [event.type for event in stream], getattr(stream, helper)()
    if not isinstance(made, Iterator):
        return made
    events = []
    with cast(Any, made):
        for event in made:
            events.append(event)
            if len(events) == call.leave_after:
                break
    return events


async def _awaited(client: Any, call: Call) -> Any:
    made = reduce(getattr, call.path.split("."), client)(**call.arguments)
    if helper := STREAM_HELPERS.get(call.path):
        async with made as stream:
            return [event.type async for event in stream], await getattr(stream, helper)()
    made = await made
    if not isinstance(made, AsyncIterator):
        return made
    events = []
    async with cast(Any, made):
        async for event in made:
            events.append(event)
            if len(events) == call.leave_after:
                break
    return events


def text(model: str, leave_after: int | None = None, **more: Any) -> Call:
    """A call for a completion of PROMPT, greedy and of eight tokens unless `more` says otherwise."""
    arguments = {"model": model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0} | more
    return Call("completions.create", arguments, leave_after)


def chat(model: str, path: str = "chat.completions.create", **more: Any) -> Call:
    """A call for an answer in a conversation, greedy and of eight tokens unless `more` says otherwise."""
    return Call(path, {"model": model, "messages": HI, "max_tokens": 8, "temperature": 0} | more)


def refused(error: Any, kind: type[openai.APIStatusError], param: str | None) -> None:
    """Asserts that a result is an error of this kind that names this parameter."""
    assert isinstance(error, kind), error
    assert error.param == param, error


def written(events: list[Any]) -> str:
    """The text of a stream's events, joined."""
    choices = [choice for event in events for choice in event.choices]
    return "".join(getattr(choice, "text", None) or _delta(choice) for choice in choices)


def _delta(choice: Any) -> str:
    return choice.delta.content or "" if hasattr(choice, "delta") else ""


@scenario
def a_text_is_gone_on_with(model: str) -> Steps:
    answer = yield text(model)
    (choice,) = answer.choices
    assert (answer.object, choice.index) == ("text_completion", 0)
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@scenario
def several_prompts_are_answered_in_order(model: str) -> Steps:
    one = yield text(model, prompt="a")
    other = yield text(model, prompt="bc")
    both = yield text(model, prompt=["a", "bc"])
    assert [c.text for c in both.choices] == [one.choices[0].text, other.choices[0].text]


@scenario
def ids_are_a_prompt(model: str) -> Steps:
    answer = yield text(model, prompt="abc", extra_body={"return_token_ids": True})
    ids = answer.choices[0].model_extra["prompt_token_ids"]
    again = yield text(model, prompt=ids)
    both = yield text(model, prompt=[ids, ids])
    assert {c.text for c in [*again.choices, *both.choices]} == {answer.choices[0].text}


@scenario
def a_stream_is_the_same_text(model: str) -> Steps:
    whole = yield text(model, max_tokens=24)
    events = yield text(model, max_tokens=24, stream=True)
    assert written(events) == whole.choices[0].text
    assert [c.finish_reason for e in events for c in e.choices][-1] == whole.choices[0].finish_reason


@scenario
def the_usage_comes_last(model: str) -> Steps:
    events = yield text(model, stream=True, stream_options={"include_usage": True})
    assert events[-1].choices == []
    assert events[-1].usage.completion_tokens > 0
    assert all(event.usage is None for event in events[:-1])


@scenario
def a_stream_may_be_left(model: str) -> Steps:
    begun = yield text(model, leave_after=1, max_tokens=100, stream=True)
    after = yield text(model)
    assert len(begun) == 1
    assert after.choices[0].finish_reason


@scenario
def the_same_seed_gives_the_same_text(model: str) -> Steps:
    first = yield text(model, temperature=0.9, max_tokens=24)
    seed = first.model_extra["seed"]
    again = yield text(model, temperature=0.9, max_tokens=24, seed=seed)
    assert again.choices[0].text == first.choices[0].text


@scenario
def choices_have_seeds_of_their_own(model: str) -> Steps:
    answer = yield text(model, n=3, temperature=1, seed=5, max_tokens=24)
    assert [c.index for c in answer.choices] == [0, 1, 2]
    assert len({c.text for c in answer.choices}) > 1
    alone = yield text(model, temperature=1, seed=5, max_tokens=24)
    assert alone.choices[0].text == answer.choices[0].text


@scenario
def choices_share_a_stream(model: str) -> Steps:
    events = yield text(model, n=3, temperature=1, seed=5, stream=True)
    whole = yield text(model, n=3, temperature=1, seed=5)
    for choice in whole.choices:
        parts = [c.text for e in events for c in e.choices if c.index == choice.index]
        assert "".join(parts) == choice.text


@scenario
def a_stop_string_is_left_out(model: str) -> Steps:
    whole = yield text(model, max_tokens=40, extra_body=WORDS)
    stop = whole.choices[0].text[5:7]
    cut = yield text(model, max_tokens=40, stop=[stop], extra_body=WORDS)
    assert cut.choices[0].text == whole.choices[0].text.partition(stop)[0]
    assert cut.choices[0].finish_reason == "stop"


@scenario
def log_probabilities_come_with_texts(model: str) -> Steps:
    answer = yield text(model, logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset)
    assert len(logprobs.tokens) == answer.usage.completion_tokens
    assert all(1 <= len(top) <= 4 for top in logprobs.top_logprobs)
    assert all(logprob <= 0 for logprob in logprobs.token_logprobs)


@scenario
def log_probabilities_come_in_streams(model: str) -> Steps:
    events = yield text(model, logprobs=1, stream=True)
    parts = [c.logprobs for e in events for c in e.choices if c.logprobs]
    offsets = [offset for part in parts for offset in part.text_offset]
    assert offsets == sorted(offsets)
    assert offsets[0] == 0


@scenario
def penalties_and_biases_are_taken(model: str) -> Steps:
    plain = yield text(model, max_tokens=2, extra_body={"return_token_ids": True})
    first = plain.choices[0].model_extra["token_ids"][0]
    biased = yield text(
        model,
        max_tokens=2,
        logit_bias={str(first): -100},
        presence_penalty=0.5,
        frequency_penalty=0.5,
        top_p=0.9,
        extra_body={"return_token_ids": True, "top_k": 40, "min_p": 0.01, "repetition_penalty": 1.1},
    )
    assert biased.choices[0].model_extra["token_ids"][0] != first


@scenario
def ends_may_be_held_back_and_added(model: str) -> Steps:
    long = yield text(model, max_tokens=20, extra_body={"ignore_eos": True, "return_token_ids": True})
    ids = long.choices[0].model_extra["token_ids"]
    extra = {"ignore_eos": True, "min_tokens": 4, "stop_token_ids": [ids[10]], "return_token_ids": True}
    cut = yield text(model, max_tokens=20, extra_body=extra)
    assert len(ids) == 20
    assert 4 <= len(cut.choices[0].model_extra["token_ids"]) <= 20


@scenario
def speculation_changes_nothing(model: str) -> Steps:
    asked: dict[str, Any] = {"max_tokens": 40, "temperature": 0.8, "seed": 3}
    texts = set()
    for control in ({}, {"enabled": False}, {"nodes": 2}, {"sources": ["lookup"]}, {"learn": False}):
        answer = yield text(model, **asked, extra_body={"speculation": control})
        texts.add(answer.choices[0].text)
    assert len(texts) == 1


@scenario
def speculation_is_reported_on_request(model: str) -> Steps:
    extra = {"per_request_spec_decode_metrics": "detailed", "ignore_eos": True}
    answer = yield text(model, max_tokens=60, extra_body=extra)
    speculation = answer.model_extra["metrics"]["speculative_decoding"]
    accepted = speculation["num_accepted_draft_tokens"]
    assert accepted == sum(speculation["per_step_accepted"])
    assert speculation["num_draft_tokens"] >= accepted
    events = yield text(
        model, max_tokens=60, stream=True, stream_options={"include_usage": True}, extra_body=extra
    )
    assert events[-1].model_extra["metrics"]["speculative_decoding"]["num_spec_steps"] > 0


@scenario
def a_prediction_is_drafted_from(model: str) -> Steps:
    answer = yield text(model, max_tokens=40, extra_body=WORDS)
    said = answer.choices[0].text
    extra = {
        **WORDS,
        "prediction": {"type": "content", "content": said},
        "speculation": {"sources": ["prediction"]},
    }
    # A step that many requests share may admit no draft.
    for _ in range(10):
        again = yield text(model, max_tokens=40, extra_body=extra)
        details = again.usage.completion_tokens_details
        assert again.choices[0].text == said
        if details.accepted_prediction_tokens:
            break
    assert details.accepted_prediction_tokens > 0
    assert details.rejected_prediction_tokens >= 0


@scenario
def a_conversation_is_answered(model: str) -> Steps:
    answer = yield chat(model)
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content is not None


@scenario
def all_roles_and_parts_are_taken(model: str) -> Steps:
    messages = [
        {"role": "system", "content": "be short"},
        {"role": "developer", "content": "shorter"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d", "name": "me"},
    ]
    answer = yield chat(model, messages=messages, max_tokens=4)
    assert answer.usage.prompt_tokens > 10


@scenario
def a_streamed_conversation_begins_with_the_role(model: str) -> Steps:
    whole = yield chat(model)
    events = yield chat(model, stream=True)
    assert events[0].choices[0].delta.role == "assistant"
    assert written(events) == whole.choices[0].message.content


@scenario
def the_clients_own_stream_helper_works(model: str) -> Steps:
    extra = {"structured_outputs": {"regex": "(yes|no), [0-9]{3}"}}  # ends by itself, as the helper wants it
    whole = yield chat(model, max_tokens=40, extra_body=extra)
    types, final = yield chat(model, "chat.completions.stream", max_tokens=40, extra_body=extra)
    assert "chunk" in types
    assert final.choices[0].message.content == whole.choices[0].message.content


@scenario
def both_names_of_the_limit_are_taken(model: str) -> Steps:
    old = yield chat(model, max_tokens=5)
    arguments = {"model": model, "messages": HI, "max_completion_tokens": 5, "temperature": 0}
    new = yield Call("chat.completions.create", arguments)
    assert old.choices[0].message.content == new.choices[0].message.content
    both = yield chat(model, max_tokens=5, max_completion_tokens=5)
    assert both.choices[0].message.content == old.choices[0].message.content
    both = yield chat(model, max_completion_tokens=5)
    refused(both, openai.BadRequestError, "max_tokens")


@scenario
def log_probabilities_come_with_conversations(model: str) -> Steps:
    answer = yield chat(model, logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    assert all(len(each.top_logprobs) == 2 for each in content)


@scenario
def a_prediction_of_a_conversation_is_drafted_from(model: str) -> Steps:
    answer = yield chat(model, max_tokens=40, extra_body=WORDS)
    said = answer.choices[0].message.content
    again = yield chat(
        model, max_tokens=40, prediction={"type": "content", "content": said}, extra_body=WORDS
    )
    assert again.choices[0].message.content == said
    assert again.usage.completion_tokens_details.accepted_prediction_tokens > 0


@scenario
def json_is_written(model: str) -> Steps:
    answer = yield chat(
        model, max_tokens=100, response_format={"type": "json_object"}, temperature=0.7, seed=1
    )
    (choice,) = answer.choices
    assert choice.message.content.lstrip().startswith("{")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict)


@scenario
def a_schema_is_kept(model: str) -> Steps:
    named = {"name": "side", "schema": {"enum": ["left", "right"]}, "strict": True}
    answer = yield chat(model, max_tokens=40, response_format={"type": "json_schema", "json_schema": named})
    assert json.loads(answer.choices[0].message.content) in ("left", "right")


class ParsedSide(BaseModel):
    """An answer that the client's own helper asks for."""

    left: bool


@scenario
def an_answer_is_parsed_by_the_client(model: str) -> Steps:
    answer = yield chat(
        model, "chat.completions.parse", response_format=ParsedSide, max_tokens=100, temperature=0.7, seed=2
    )
    if not isinstance(answer, openai.LengthFinishReasonError):  # white space is free
        assert isinstance(answer.choices[0].message.parsed, ParsedSide)


@scenario
def a_regular_expression_is_kept(model: str) -> Steps:
    extra = {"structured_outputs": {"regex": "(yes|no), [0-9]{3}"}}
    answer = yield text(model, max_tokens=40, extra_body=extra)
    assert re.fullmatch("(yes|no), [0-9]{3}", answer.choices[0].text)
    assert answer.choices[0].finish_reason == "stop"


@scenario
def a_schema_that_cannot_be_kept_is_refused(model: str) -> Steps:
    named = {"name": "x", "schema": {"type": "array", "uniqueItems": True}}
    for stream in (False, True):
        error = yield chat(
            model, stream=stream, response_format={"type": "json_schema", "json_schema": named}
        )
        refused(error, openai.BadRequestError, "response_format")


@scenario
def models_are_listed(model: str) -> Steps:
    page = yield Call("models.list")
    assert model in [each.id for each in page.data]
    one = yield Call("models.retrieve", {"model": model})
    assert (one.id, one.object) == (model, "model")


@scenario
def an_unknown_model_is_an_error(model: str) -> Steps:
    for call in (text("nobody"), chat("nobody"), text("nobody", stream=True)):
        error = yield call
        refused(error, openai.NotFoundError, "model")
        assert error.code == "model_not_found"


@scenario
def what_is_out_of_range_is_refused_by_name(model: str) -> Steps:
    wrong: dict[str, Any] = {"temperature": 101, "top_p": 0, "n": 17, "max_tokens": 0, "seed": 2**64}
    for name, value in wrong.items():
        for call in (text(model, **{name: value}), chat(model, **{name: value})):
            error = yield call
            refused(error, openai.BadRequestError, name)


@scenario
def what_is_not_supported_is_refused_by_name(model: str) -> Steps:
    refusals: list[dict[str, Any]] = [{"modalities": ["audio"]}, {"reasoning_effort": "low"}]
    for more in refusals:
        error = yield chat(model, **more)
        (name,) = more
        refused(error, openai.BadRequestError, name)
    error = yield text(model, suffix="x")
    refused(error, openai.BadRequestError, "suffix")


@scenario
def a_refusal_comes_before_a_stream(model: str) -> Steps:
    error = yield text(model, stream=True, temperature=-1)
    refused(error, openai.BadRequestError, "temperature")


@scenario
def a_path_that_does_not_exist_is_an_error(model: str) -> Steps:
    error = yield Call("embeddings.create", {"model": model, "input": "x"})
    assert isinstance(error, openai.NotFoundError)
