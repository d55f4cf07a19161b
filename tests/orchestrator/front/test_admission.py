"""What a client can get wrong, refused by name and value."""

import math
from typing import Any

import pytest

from orchestrator.fleet.target_model import TargetModel
from orchestrator.front.admission import admit, check_text, choose_target, session_key
from outrider.v1.generation_pb2 import GenerateStart
from speculative.errors import InvalidRequest, Unavailable, UnknownModel

BARE = TargetModel("toy", 64, 96, "", None, ("lookup",))


def admitted(ids: Any = (5, 6, 7), **fields: Any) -> Any:
    start = GenerateStart(**fields)
    return admit(start, session_key(start), ids, BARE, 128)


def target(name: str) -> TargetModel:
    return TargetModel(name, 64, 96, "", None, ())


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"max_tokens": 0}, "max_tokens is 0; 1 to 61 are possible"),
        ({"max_tokens": -3}, "max_tokens is -3"),
        ({"max_tokens": 62}, "the context of 64 less the prompt's 3"),
        ({"max_tokens": 2**62}, "max_tokens is 4611686018427387904"),
        ({"sampling": {"temperature": math.nan}}, "temperature is nan"),
        ({"sampling": {"temperature": -1.0}}, "temperature is -1"),
        ({"sampling": {"top_p": 0.0}}, "top_p is 0"),
        ({"sampling": {"top_p": 1.5}}, "top_p is 1.5"),
        ({"sampling": {"top_k": 97}}, "top_k is 97"),
        ({"sampling": {"top_k": -1}}, "top_k is -1"),
        ({"sampling": {"min_p": 2.0}}, "min_p is 2"),
        ({"sampling": {"repetition_penalty": 0.0}}, "repetition_penalty is 0"),
        ({"sampling": {"presence_penalty": math.inf}}, "presence_penalty is inf"),
        ({"sampling": {"logit_bias": {96: 1.0}}}, "96"),
        ({"sampling": {"logit_bias": {n: 1.0 for n in range(1025)}}}, "1025"),
        ({"speculation": {"node_limit": 257}}, "node_limit is 257; 0 to 256"),
        ({"speculation": {"node_limit": -1}}, "node_limit is -1"),
        ({"speculation": {"policy": "best"}}, "speculation.policy is 'best'; give one of survival, fixed,"),
        (
            {"speculation": {"enabled": False, "sources": ["a", "b"]}},
            "speculation.sources names 'a', but speculation.enabled is false: leave one of the two out",
        ),
        ({"speculation": {"enabled": False, "corpora": ["a"]}}, "speculation.corpora names 'a', but"),
        ({"speculation": {"enabled": False, "node_limit": 8}}, "speculation.node_limit is 8, but"),
        ({"stop": ["x"]}, "no tokenizer"),
        ({"sampling": {"min_tokens": -1}}, "min_tokens is -1"),
        ({"max_tokens": 5, "sampling": {"min_tokens": 6}}, "min_tokens is 6, but at most 5"),
        ({"sampling": {"min_tokens": 62}}, "min_tokens is 62, but at most 61"),
        ({"sampling": {"stop_ids": [5, 96]}}, "stop_ids has 96; ids are below 96"),
        ({"sampling": {"stop_ids": range(65)}}, "stop_ids has 65 ids; give at most 64"),
        ({"message_interval_ms": 10_001}, "message_interval_ms is 10001; at most 10000 are possible"),
        (
            {"message_interval_ms": 200, "device": {}},
            "message_interval_ms is 200, but a device drafts, which needs tokens at once: leave one",
        ),
        ({"n": 0}, "n is 0; 1 to 16"),
        ({"n": -1}, "n is -1; 1 to 16"),
        ({"n": 17}, "n is 17; 1 to 16"),
        ({"logprobs": {"top_logprobs": 21}}, "top_logprobs is 21; 0 to 20"),
        ({"logprobs": {"top_logprobs": -1}}, "top_logprobs is -1"),
        ({"logprobs": {"logprobs_of": 7}}, "logprobs_of is 7"),
        ({"grammar": {}}, "grammar is empty"),
        ({"grammar": {"regex": ""}}, "regex has 0 bytes; give 1 to 8192"),
        ({"grammar": {"json_schema": "[]"}}, "must be a JSON object"),
        ({"grammar": {"regex": "a"}}, "no tokenizer: regex is not possible"),
        ({"grammar": {"regex": "a"}, "sampling": {"ignore_eos": True}}, "ignore_eos cannot be together"),
        ({"session": "s" * 129}, "129"),
        ({"session": "two\nlines"}, "cannot be printed"),
        ({"tenant": "t" * 129}, "129"),
        ({"tenant": "\0"}, "cannot be printed"),
    ],
)
def test_a_value_out_of_range_is_named(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        admitted(**fields)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        ((), "the prompt is empty"),
        ((5, 96), "id 96 (number 1) is outside the vocabulary: ids are below 96"),
        ((5, 2**32 - 1), "outside the vocabulary"),
        ([5] * 64, "64 ids, which leaves no room in the context of 64"),
    ],
)
def test_a_prompt_that_cannot_be_decoded_is_refused(ids: Any, says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        admitted(ids)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("stops", "says"),
    [(["s"] * 1000, "1000"), ([""], "0 bytes"), (["x" * 257], "257 bytes")],
)
def test_stop_strings_have_bounds(stops: list[str], says: str, table: Any) -> None:
    start = GenerateStart(stop=stops)
    with pytest.raises(InvalidRequest, match=says):
        admit(start, session_key(start), [5], TargetModel("toy", 64, 96, "d", table, ()), 128)


def test_the_limit_is_what_was_asked_for_or_the_default_or_what_is_left() -> None:
    assert admitted(max_tokens=61).limit == 64
    assert admitted().limit == 64
    start = GenerateStart()
    assert admit(start, session_key(start), [5], target("x"), 8).limit == 9


def test_a_seed_and_a_session_are_drawn_where_they_are_left_out() -> None:
    assert admitted().seed != admitted().seed
    assert all(admitted().seed < 2**53 for _ in range(40)), "every JSON reader keeps the digits"
    assert admitted().key.session != admitted().key.session
    assert admitted(seed=0).seed == 0
    assert admitted(session="mine", tenant="us").key == ("us", "mine", 0)


def test_no_nodes_means_no_speculation() -> None:
    assert admitted().speculation.enabled
    assert not admitted(speculation={"node_limit": 0}).speculation.enabled
    assert not admitted(speculation={"enabled": False}).speculation.enabled
    both = admitted(speculation={"enabled": False, "node_limit": 0, "learn": False, "prediction": "x"})
    assert not both.speculation.enabled


def test_text_too_large_for_the_context_is_refused_unread(table: Any) -> None:
    with_tokens = TargetModel("toy", 64, 96, "d", table, ())
    with pytest.raises(InvalidRequest, match=r"10000000 characters.*at most 4096 bytes"):
        check_text("x" * 10_000_000, with_tokens)
    with pytest.raises(InvalidRequest, match="empty"):
        check_text("", with_tokens)
    assert check_text("x" * 4096, with_tokens) is table


def test_the_model_may_be_left_out_where_there_is_one() -> None:
    assert choose_target("", [target("one")], 0).name == "one"
    with pytest.raises(InvalidRequest, match="one, two"):
        choose_target("", [target("two"), target("one")], 0)


def test_an_unknown_model_is_told_from_a_verifier_not_reached_yet() -> None:
    with pytest.raises(UnknownModel, match=r"no model 'two' here; served: one; verifiers not reached yet: 1"):
        choose_target("two", [target("one")], 1)
    with pytest.raises(Unavailable, match="no verifier can be reached"):
        choose_target("two", [], 1)


def test_each_choice_has_a_session_and_a_seed_of_its_own() -> None:
    request = admitted(session="mine", seed=42, n=3)
    assert request.keys == (("", "mine", 0), ("", "mine", 1), ("", "mine", 2))
    assert [request.seed_of(choice) for choice in range(2)] == [42, 0x4713374708819A34]
    assert admitted().choices == 1
