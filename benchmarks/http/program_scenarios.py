"""What ordinary programs do with the openai client, as scenarios: chat loops, load generators, evaluations.

Importing this module adds its scenarios to those of `openai_scenarios`.
"""

from typing import Any

import openai

from benchmarks.http.openai_scenarios import HI, Call, Steps, chat, refused, scenario, text, written

LONG = "def add(a, b):\n    return a + b\n" * 3


@scenario
def an_answer_is_appended_turn_after_turn(model: str) -> Steps:
    messages: list[Any] = list(HI)
    counts = []
    for _ in range(4):
        answer = yield chat(model, messages=messages)
        counts.append(answer.usage.prompt_tokens)
        messages += [answer.choices[0].message, {"role": "user", "content": "and?"}]
    assert counts == sorted(set(counts)), "each turn has the turns before it"


@scenario
def what_frameworks_add_changes_nothing(model: str) -> Steps:
    plain = yield chat(model)
    added = yield chat(
        model,
        user="me",
        metadata={"session": "7"},
        store=False,
        service_tier="auto",
        safety_identifier="me",
        prompt_cache_key="k",
        parallel_tool_calls=True,
        modalities=["text"],
        extra_body={"tools": None, "tool_choice": None, "reasoning_effort": None},
    )
    assert added.choices == plain.choices


@scenario
def guidellm_counts_as_it_reads(model: str) -> Steps:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = yield text(model, stream=True, extra_body={"stream_options": options, "ignore_eos": True})
    counts = [event.usage.completion_tokens for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 8
    events = yield chat(
        model,
        messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        stream=True,
        extra_body={"stream_options": options, "ignore_eos": True},
    )
    assert events[-1].usage.completion_tokens == 8


@scenario
def vllm_bench_serve_sees_the_first_token(model: str) -> Steps:
    arguments = {
        "model": model,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        "max_completion_tokens": 8,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "extra_body": {"ignore_eos": True, "repetition_penalty": 1.0},
    }
    events = yield Call("chat.completions.create", arguments)
    first = events[0].choices[0]
    assert first.delta.role == "assistant"
    assert events[-1].usage.completion_tokens == 8
    whole = yield chat(model, extra_body={"ignore_eos": True})
    assert written(events) == whole.choices[0].message.content


@scenario
def a_prompt_that_was_seen_is_reported_as_cached(model: str) -> Steps:
    yield text(model, prompt=LONG, max_tokens=1)
    again = yield text(model, prompt=LONG, max_tokens=1)
    cached = again.usage.prompt_tokens_details.cached_tokens
    assert 0 < cached < again.usage.prompt_tokens


@scenario
def without_a_prediction_nothing_is_billed_as_one(model: str) -> Steps:
    answer = yield text(model, max_tokens=40, extra_body={"ignore_eos": True})
    details = answer.usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (0, 0)


@scenario
def an_evaluation_scores_what_follows_a_prompt(model: str) -> Steps:
    extra = {"return_token_ids": True, "ignore_eos": True}
    said = yield text(model, prompt=LONG, logprobs=1, extra_body=extra)
    choice = said.choices[0]
    ids = choice.model_extra["prompt_token_ids"] + choice.model_extra["token_ids"]
    for most, prompt in ((1, ids), (0, ids), (1, LONG + choice.text)):
        scored = yield text(model, prompt=prompt, max_tokens=most, echo=True, logprobs=1, seed=1234)
        logprobs = scored.choices[0].logprobs
        assert len(logprobs.tokens) == scored.usage.total_tokens == scored.usage.prompt_tokens + most
        assert logprobs.token_logprobs[0] is None
        assert logprobs.top_logprobs[0] is None
        start = len(choice.model_extra["prompt_token_ids"])
        if prompt == ids:
            found = logprobs.token_logprobs[start : len(ids)]
            known = choice.logprobs.token_logprobs
            assert all(abs(one - other) < 1e-3 for one, other in zip(found, known, strict=True))
        assert scored.choices[0].text.startswith(LONG)


@scenario
def an_echo_can_be_streamed(model: str) -> Steps:
    whole = yield text(model, prompt="abc", echo=True, n=2, temperature=0.8, seed=4)
    events = yield text(model, prompt="abc", echo=True, n=2, temperature=0.8, seed=4, stream=True)
    for choice in whole.choices:
        parts = [c.text for e in events for c in e.choices if c.index == choice.index]
        assert "".join(parts) == choice.text
        assert choice.text.startswith("abc")


@scenario
def a_gap_needs_a_model_that_fills_gaps(model: str) -> Steps:
    error = yield text(model, suffix="x")
    refused(error, openai.BadRequestError, "suffix")


@scenario
def a_request_has_an_id(model: str) -> Steps:
    answer = yield text(model, extra_headers={"x-request-id": "mine"})
    assert answer._request_id == "mine"
    error = yield text(model, temperature=-1)
    assert error.request_id
    assert error.type == "invalid_request_error"


@scenario
def reasoning_of_earlier_turns_may_come_along(model: str) -> Steps:
    turn: dict[str, Any] = {
        "role": "assistant",
        "content": "c",
        "reasoning_content": "hm",
        "annotations": [],
        "audio": None,
    }
    turn |= {"provider_specific_fields": {"refusal": None}, "tool_calls": None, "function_call": None}
    answer = yield chat(model, messages=[*HI, turn, *HI])
    assert answer.choices[0].finish_reason in ("stop", "length")
