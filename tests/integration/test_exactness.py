"""Ids through separate processes: the same with and without drafts, and the model's own."""

from pathlib import Path
from typing import Any

import pytest

from outrider.client import Client
from speculative.errors import InvalidRequest
from speculative.policies.names import POLICIES

PROMPT = (
    "def add(left, right):\n    return left + right\nfor index, value in enumerate(values):\n    print(index"
)

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8},
    "hot": {"temperature": 1.7},
    "cut": {"temperature": 1.0, "top_k": 12, "top_p": 0.9, "min_p": 0.02},
    "penalised": {
        "temperature": 0.7,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.2,
    },
    "biased": {"temperature": 0.0, "logit_bias": {1: -100.0, 40: 3.0}},
}


@pytest.mark.parametrize("way", WAYS)
def test_drafts_never_change_the_ids(client: Client, way: str) -> None:
    request = {"max_tokens": 100, "seed": 3, **WAYS[way]}
    plain = client.generate(PROMPT, **request, speculation=False)
    assert plain.usage.acceptance_length == 1.0
    assert set(plain.sources) == {"target"}
    for steer in ({}, {"sources": ["lookup"]}, {"sources": ["drafter"]}, {"nodes": 1}, {"nodes": 100}):
        drafted = client.generate(PROMPT, **request, **steer)
        assert drafted.ids == plain.ids, steer
        assert (drafted.text, drafted.finish_reason) == (plain.text, plain.finish_reason), steer


@pytest.mark.parametrize("way", ["greedy", "sampled"])
def test_no_policy_changes_the_ids(client: Client, way: str) -> None:
    request = {"max_tokens": 60, "seed": 3, **WAYS[way]}
    plain = client.generate(PROMPT, **request, speculation=False)
    for policy in (*POLICIES, "fixed:1"):
        assert client.generate(PROMPT, **request, policy=policy).ids == plain.ids, policy


def test_a_wrong_policy_is_refused_with_the_names(client: Client) -> None:
    with pytest.raises(InvalidRequest, match="'best'; give one of survival, fixed, heuristic"):
        client.generate(PROMPT, policy="best")


def test_greedy_ids_are_those_of_generate(client: Client, tiny_llama: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    for prompt in ([5, 9, 30, 41], [7] * 40):
        with torch.inference_mode():
            whole = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=60, pad_token_id=0)
        assert client.generate(ids=prompt, temperature=0, max_tokens=60).ids == tuple(
            whole[0, len(prompt) :].tolist()
        )


def test_drafts_are_accepted_and_credited(client: Client) -> None:
    request: dict[str, Any] = {"temperature": 0.0, "max_tokens": 190, "logit_bias": {1: -100.0}}
    # On a busy machine the sources may be late for all of a request.
    answers = (client.generate(PROMPT, **request) for _ in range(50))
    completion = next(answer for answer in answers if answer.usage.acceptance_length > 1.0)
    usage = completion.usage
    assert sum(usage.accepted_by_source.values()) == usage.completion_tokens - completion.sources.count(
        "target"
    )
    for source, count in usage.accepted_by_source.items():
        assert completion.sources.count(source) == count


def test_the_same_seed_gives_the_same_ids_and_another_gives_others(client: Client) -> None:
    request: dict[str, Any] = {"max_tokens": 60, "temperature": 1.0}
    first = client.generate(PROMPT, **request)
    again = client.generate(PROMPT, **request, seed=first.seed)
    other = client.generate(PROMPT, **request)
    assert first.ids == again.ids
    assert first.ids != other.ids


def test_a_stop_string_ends_the_request_and_is_left_out_of_the_text(client: Client) -> None:
    request: dict[str, Any] = {"temperature": 0.9, "max_tokens": 120, "seed": 5, "logit_bias": {1: -100.0}}
    whole = client.generate(PROMPT, **request).text
    stop = whole[20:23]
    for speculation in (True, False):
        cut = client.generate(PROMPT, **request, stop=stop, speculation=speculation)
        assert cut.finish_reason == "stop"
        assert cut.text == whole[: whole.index(stop)]


def test_streamed_chunks_are_the_completion(client: Client) -> None:
    stream = client.stream(PROMPT, max_tokens=80, seed=2)
    chunks = list(stream)
    completion = stream.completion()
    assert tuple(id_ for chunk in chunks for id_ in chunk.ids) == completion.ids
    assert "".join(chunk.text for chunk in chunks) == completion.text
    assert completion.ids == client.generate(PROMPT, max_tokens=80, seed=2).ids
