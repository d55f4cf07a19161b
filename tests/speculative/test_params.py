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
        {"repetition_penalty": 101},
        {"presence_penalty": -101},
        {"frequency_penalty": 101},
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


@pytest.mark.parametrize("fields", [{"top_k": 97}, {"logit_bias": ((96, 1.0),)}])
def test_what_needs_more_ids_than_there_are_is_refused(fields: dict[str, Any]) -> None:
    SamplingParams(**fields).check_vocabulary(200)
    with pytest.raises(InvalidRequest, match=r"9[67]"):
        SamplingParams(**fields).check_vocabulary(96)


def test_the_smallest_temperatures_are_greedy() -> None:
    assert SamplingParams(temperature=0).greedy
    assert SamplingParams(temperature=9.9e-6).greedy
    assert not SamplingParams(temperature=1e-5).greedy
