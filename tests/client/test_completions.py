"""Requests that a client builds and completions that it folds from chunks, without any connection."""

from typing import Any

import numpy as np
import pytest

from outrider.client.completions import CompletionBuilder, Logprob
from outrider.client.options import Options, build_request, for_whole_answer
from outrider.v1.generation_pb2 import GenerateResponse
from speculative.errors import InvalidRequest, OutriderError, Unavailable

STARTED = GenerateResponse(started={"session": "s", "seed": 7, "source_names": ["lookup", "drafter"]})


def tokens(ids: list[int], text: str, token_sources: bytes, position: int = 0) -> GenerateResponse:
    return GenerateResponse(
        tokens={"ids": ids, "text": text, "token_sources": token_sources, "position": position}
    )


def test_options_left_out_are_not_sent() -> None:
    start = build_request("hello", Options()).start
    assert start.text == "hello"
    assert not any(start.HasField(field) for field in ("max_tokens", "seed"))
    assert not start.sampling.ListFields()
    assert start.speculation.enabled


def test_zeros_are_sent_as_they_are() -> None:
    start = build_request("", Options(temperature=0.0, seed=0, max_tokens=0, nodes=0, top_k=0)).start
    assert start.WhichOneof("prompt") == "text"
    assert start.sampling.HasField("temperature")
    assert start.HasField("seed")
    assert start.HasField("max_tokens")
    assert start.speculation.HasField("node_limit")


def test_one_stop_string_is_one_stop_string() -> None:
    assert list(build_request("x", Options(stop="END")).start.stop) == ["END"]
    assert list(build_request("x", Options(stop=["a", "b"])).start.stop) == ["a", "b"]


@pytest.mark.parametrize(
    ("prompt", "options", "says"),
    [
        (None, {}, "either a prompt or ids"),
        ("x", {"ids": [1]}, "either a prompt or ids"),
        (None, {"ids": [3, -1]}, "ids has -1"),
        (None, {"ids": [2**32]}, "ids has 4294967296"),
        ("x", {"seed": -1}, "seed is -1"),
        ("x", {"seed": 2**64}, "seed is 18446744073709551616"),
        ("x", {"nodes": 2**63}, "nodes is"),
        ("x", {"logit_bias": {-1: 1.0}}, "logit_bias has -1"),
        ("x", {"temperature": "hot"}, "temperature is 'hot'; it must be a number"),
        ("x", {"temprature": 0.5}, "no option 'temprature'; did you mean 'temperature'?"),
        ("x", {"max_new_tokens": 5}, "no option 'max_new_tokens'; did you mean 'max_tokens'?"),
        ("x", {"qqq": 5}, "no option 'qqq'; there are ids, max_tokens"),
        (None, {"ids": 5}, "ids is 5; it must be a list of token ids"),
        (None, {"ids": "5,6"}, "ids is '5,6'; it must be a list of token ids"),
        (None, {"ids": b"56"}, "ids is b'56'"),
        (None, {"ids": [5, "6"]}, "ids has '6'; token ids are whole numbers"),
        (None, {"ids": [5.0]}, "ids has 5.0"),
        (None, {"ids": iter([5])}, "must be a list"),
        (5, {}, "prompt is 5; it must be a string"),
        ("x", {"max_tokens": "9"}, "max_tokens is '9'; it must be a whole number"),
        ("x", {"max_tokens": 9.5}, "max_tokens is 9.5"),
        ("x", {"n": True}, "n is True"),
        ("x", {"seed": 1.5}, "seed is 1.5"),
        ("x", {"speculation": "off"}, "speculation is 'off'; it must be True or False"),
        ("x", {"logprobs": 5}, "logprobs is 5"),
        ("x", {"stop": 5}, "stop is 5; it must be a string, or a list of strings"),
        ("x", {"stop": ["a", 5]}, "stop is ['a', 5]"),
        ("x", {"sources": 5}, "sources is 5"),
        ("x", {"model": 5}, "model is 5; it must be a string"),
        ("x", {"logit_bias": [(1, 2.0)]}, "logit_bias is [(1, 2.0)]; it must be token ids"),
        ("x", {"logit_bias": {1: "much"}}, "logit_bias of id 1 is 'much'"),
        ("x", {"message_interval_ms": -1}, "message_interval_ms is -1; it must be a whole number"),
        ("x", {"message_interval_ms": 0.5}, "message_interval_ms is 0.5"),
        ("x", {"message_interval_ms": 10_001}, "a whole number from 0 to 10000"),
        ("x", {"timeout": 0}, "timeout is 0; it must be a number of seconds above 0"),
        ("x", {"timeout": -1}, "timeout is -1"),
        ("x", {"timeout": 1e30}, "timeout is 1e+30"),
        ("x", {"timeout": float("nan")}, "timeout is nan"),
        ("x", {"timeout": float("inf")}, "timeout is inf"),
        ("x", {"timeout": "5"}, "timeout is '5'"),
        ("x", {"min_tokens": 2**63}, "min_tokens is"),
        ("x", {"n": -(2**63) - 1}, "n is"),
        ("x", {"stop_ids": [-1]}, "stop_ids has -1"),
        ("x", {"top_logprobs": 3}, "top_logprobs is 3, but logprobs were not asked for"),
        ("x", {"logprobs_of": "raw"}, "logprobs_of is 'raw', but logprobs"),
        ("x", {"logprobs": True, "top_logprobs": 21}, "top_logprobs is 21; 0 to 20"),
        ("x", {"logprobs": True, "logprobs_of": "cooked"}, "'cooked'; raw and processed are possible"),
        ("x\ud800", {}, "not a request"),
    ],
)
def test_an_invalid_option_is_refused(prompt: Any, options: Any, says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        build_request(prompt, options)
    assert says in str(caught.value)


def test_none_is_the_default_of_every_option() -> None:
    nothing: Any = dict.fromkeys(Options.__annotations__) | {"speculation": True}
    assert build_request("x", nothing) == build_request("x", Options())


def test_an_answer_that_is_wanted_whole_comes_in_few_messages_unless_the_caller_says_otherwise() -> None:
    for asked, interval in ((None, 200), (5, 5), (0, 0)):
        start = build_request("x", for_whole_answer(Options(message_interval_ms=asked))).start
        assert start.message_interval_ms == interval
    assert build_request("x", for_whole_answer(Options())).start.message_interval_ms == 200
    assert build_request("x", Options()).start.message_interval_ms == 0


def test_one_source_is_one_source() -> None:
    assert list(build_request("x", Options(sources="lookup")).start.speculation.sources) == ["lookup"]
    assert list(build_request("x", Options(sources=["a", "b"])).start.speculation.sources) == ["a", "b"]


def test_numbers_of_numpy_are_numbers() -> None:
    asked: Any = {"ids": np.array([5, 6]), "max_tokens": np.int64(3), "temperature": np.float32(0.5)}
    start = build_request(None, asked).start
    assert (list(start.ids.ids), start.max_tokens, start.sampling.temperature) == ([5, 6], 3, 0.5)


def test_an_answer_is_the_sum_of_its_chunks() -> None:
    builder = CompletionBuilder()
    assert builder.add(STARTED) is None
    first = builder.add(tokens([5, 6], "ab", b"\0\2"))
    assert first is not None
    assert first.sources == ("target", "drafter")
    builder.add(tokens([7], "", b"\1", 2))
    usage = {"completion_tokens": 3, "rounds": 2, "accepted_by_source": {"drafter": 1, "lookup": 1}}
    last = builder.add(GenerateResponse(finished={"reason": 1, "text": "c", "usage": usage}))
    assert last is not None
    assert (last.ids, last.text) == ((), "c")
    completion = builder.completion()
    assert (completion.ids, completion.text) == ((5, 6, 7), "abc")
    assert completion.sources == ("target", "drafter", "lookup")
    assert (completion.session, completion.seed, completion.finish_reason) == ("s", 7, "stop")
    assert completion.usage.acceptance_length == 1.5
    assert completion.usage.accepted_by_source == {"drafter": 1, "lookup": 1}


@pytest.mark.parametrize("position", [5, 7, 8, 10])
def test_ids_that_do_not_join_those_before_are_no_part_of_the_answer(position: int) -> None:
    builder = CompletionBuilder()
    builder.add(GenerateResponse(started={"session": "s", "prompt_tokens": 6}))
    builder.add(tokens([5, 6, 7], "abc", bytes(3), 6))
    with pytest.raises(Unavailable, match=f"for position {position}, but 9 is next"):
        builder.add(tokens([8], "d", b"\0", position))
    assert builder.have() == [(5, 6, 7)], "with these it can be asked again"
    builder.add(tokens([8], "d", b"\0", 9))
    assert builder.have() == [(5, 6, 7, 8)]


def test_a_request_that_failed_or_broke_off_is_no_completion() -> None:
    failed = CompletionBuilder()
    with pytest.raises(OutriderError, match="NaN"):
        failed.add(GenerateResponse(finished={"reason": 4, "message": "NaN"}))
    broken = CompletionBuilder()
    broken.add(STARTED)
    with pytest.raises(OutriderError, match="broke off after 0 tokens"):
        broken.completion()


def test_options_beside_sampling_are_sent_as_they_are() -> None:
    start = build_request("x", Options(min_tokens=3, stop_ids=[7], ignore_eos=True, n=2, logprobs=True)).start
    sampling = start.sampling
    assert (sampling.min_tokens, list(sampling.stop_ids), sampling.ignore_eos) == (3, [7], True)
    assert (start.n, start.logprobs.top_logprobs) == (2, 0)
    plain = build_request("x", Options(ignore_eos=False, logprobs=False)).start
    assert not plain.HasField("n")
    assert not plain.HasField("logprobs")
    assert not plain.sampling.ListFields()


def test_a_builder_does_not_count_up_to_the_choices_that_were_asked_for() -> None:
    builder = CompletionBuilder(2**32 - 1)  # the server refuses it, if it can be reached
    assert not builder.whole
    assert builder.ended() == []


def test_choices_are_folded_separately_and_their_prompt_is_counted_once() -> None:
    builder = CompletionBuilder(2)
    builder.add(STARTED)
    for choice, id_, position in ((1, 8, 0), (0, 5, 0), (1, 9, 1)):
        logprobs = [{"logprob": -id_, "top_ids": [id_, 3], "top_logprobs": [-id_, -50.0]}]
        said = {"ids": [id_], "text": "x", "token_sources": b"\2", "choice": choice, "logprobs": logprobs}
        said["position"] = position
        chunk = builder.add(GenerateResponse(tokens=said))
        assert chunk is not None
        assert chunk.choice == choice
        assert chunk.logprobs == (Logprob(id_, -id_, ((id_, -id_), (3, -50.0))),)
    for choice, count in ((1, 2), (0, 1)):
        usage = {
            "prompt_tokens": 4,
            "completion_tokens": count,
            "rounds": 1,
            "accepted_by_source": {"drafter": count},
        }
        with pytest.raises(OutriderError, match="broke off"):
            builder.completion()
        builder.add(
            GenerateResponse(finished={"reason": 2, "choice": choice, "seed": choice, "usage": usage})
        )
    completion = builder.completion()
    assert [choice.ids for choice in completion.choices] == [(5,), (8, 9)]
    assert [choice.seed for choice in completion.choices] == [0, 1]
    assert (completion.ids, [token.id for token in completion.choices[1].logprobs]) == ((5,), [8, 9])
    usage = completion.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.rounds) == (4, 3, 2)
    assert usage.accepted_by_source == {"drafter": 3}
