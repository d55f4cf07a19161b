import math
from typing import Any

import pytest

from speculative.errors import InvalidRequest
from speculative.params import SamplingParams


def test_the_defaults_change_nothing() -> None:
    params = SamplingParams()
    assert params.plain_logits
    assert not params.greedy
    assert not params.has_cuts
    assert not params.penalised


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": -0.1},
        {"temperature": 100.5},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"temperature": "1"},
        {"temperature": True},
        {"top_k": -1},
        {"top_k": 1.5},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_p": math.nan},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": 1e-308},
        {"repetition_penalty": 0.0099},
        {"repetition_penalty": 101},
        {"presence_penalty": -101},
        {"frequency_penalty": 101},
        {"min_tokens": -1},
        {"min_tokens": 1.5},
        {"ignore_eos": 1},
    ],
)
def test_a_value_out_of_range_is_refused_by_name(fields: dict[str, Any]) -> None:
    (name, value), *_ = fields.items()
    with pytest.raises(InvalidRequest, match=name) as refusal:
        SamplingParams(**fields)
    assert repr(value) in str(refusal.value)


@pytest.mark.parametrize(
    "bias",
    [
        ((3, 101.0),),
        ((3, math.nan),),
        ((-1, 1.0),),
        ((3, 1.0), (3, 2.0)),
        tuple((i, 0.5) for i in range(1025)),
    ],
)
def test_an_odd_bias_is_refused(bias: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(InvalidRequest, match="logit_bias"):
        SamplingParams(logit_bias=bias)


def test_bias_is_kept_sorted_so_that_equal_requests_are_equal() -> None:
    assert SamplingParams(logit_bias=((7, 1.0), (2, 3.0))) == SamplingParams(logit_bias=((2, 3.0), (7, 1.0)))


@pytest.mark.parametrize("fields", [{"top_k": 97}, {"logit_bias": ((96, 1.0),)}, {"stop_ids": (3, 96)}])
def test_what_needs_more_ids_than_there_are_is_refused(fields: dict[str, Any]) -> None:
    SamplingParams(**fields).check_vocabulary(200)
    with pytest.raises(InvalidRequest, match=r"9[67]"):
        SamplingParams(**fields).check_vocabulary(96)


def test_the_smallest_temperatures_are_greedy() -> None:
    assert SamplingParams(temperature=0).greedy
    assert SamplingParams(temperature=9.9e-6).greedy
    assert not SamplingParams(temperature=1e-5).greedy


def test_stop_ids_are_kept_sorted_and_once() -> None:
    assert SamplingParams(stop_ids=(7, 2, 7)).stop_ids == (2, 7)
    for odd in (-1, 1.5, True):
        with pytest.raises(InvalidRequest, match="stop_ids is"):
            SamplingParams(stop_ids=(odd,))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"min_tokens": 11}, "min_tokens is 11, but at most 10 ids .* 0 to 10"),
        ({"stop_ids": tuple(range(65))}, "stop_ids has 65 ids; give at most 64"),
    ],
)
def test_an_end_that_cannot_be_is_refused(fields: dict[str, Any], says: str) -> None:
    params = SamplingParams(**fields)
    with pytest.raises(InvalidRequest, match=says):
        params.check_stops(10)
    SamplingParams(min_tokens=10, stop_ids=tuple(range(64))).check_stops(10)


def test_what_ends_a_request_and_what_min_tokens_holds_back() -> None:
    eos = frozenset({1, 2})
    assert SamplingParams(stop_ids=(7,)).end_ids(eos) == {1, 2, 7}
    assert SamplingParams(stop_ids=(7,), ignore_eos=True).end_ids(eos) == {7}
    for ignored in (True, False):
        held = SamplingParams(stop_ids=(7,), ignore_eos=ignored, min_tokens=3).holding_back(eos)
        assert held.stop_ids == (1, 2, 7)
        assert held.reads_history
        assert not held.plain_logits
    plain = SamplingParams(stop_ids=(7,))
    assert plain.holding_back(eos) is plain
    assert plain.plain_logits
