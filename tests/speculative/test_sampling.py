"""Rules one at a time, fast paths against the long one, and `sample_token` against `process_logits`."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from speculative.digest import HostDigest
from speculative.errors import EmptySupport
from speculative.history import History
from speculative.noise import gumbel
from speculative.params import SamplingParams
from speculative.sampling import process_logits, sample_token, token_logprob

NOTHING = History.of([], 0)
EACH_FIELD: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.7, "top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.8, "frequency_penalty": 0.4},
    {"logit_bias": ((0, 2.0), (5, -1.5))},
    {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.2},
]


def logits(*values: float) -> NDArray[np.float32]:
    return np.array(values, dtype=np.float32)


def kept(values: Sequence[float], **fields: Any) -> list[int]:
    scores = process_logits(np.array(values, dtype=np.float64), SamplingParams(**fields), NOTHING)
    return [int(i) for i in np.flatnonzero(scores > -np.inf)]


def test_each_step_applies_in_its_place() -> None:
    """Bias, repetition, presence, frequency, temperature: by hand."""
    params = SamplingParams(
        temperature=0.5,
        repetition_penalty=2.0,
        presence_penalty=0.25,
        frequency_penalty=0.125,
        logit_bias=((1, 1.0), (3, -2.0)),
    )
    history = History.of([0, 1, 1, 3], 1)  # the prompt is [0]; the output is [1, 1, 3]
    expected = [
        (4.0 / 2) / 0.5,  # in the prompt only: repetition
        ((1.0 + 1) / 2 - 0.25 - 2 * 0.125) / 0.5,
        3.0 / 0.5,
        ((1.0 - 2) * 2 - 0.25 - 0.125) / 0.5,
    ]
    assert process_logits(logits(4, 1, 3, 1), params, history).tolist() == expected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("cuts", [{}, {"top_k": 3, "top_p": 0.9, "min_p": 0.01}])
def test_ids_are_held_back_until_there_are_min_tokens(temperature: float, cuts: dict[str, Any]) -> None:
    params = SamplingParams(temperature=temperature, min_tokens=2, stop_ids=(1, 3), **cuts)
    scores, noise = logits(0, 9, 1, 8), np.zeros(4)
    prompt = History.of([5, 6, 7], 3)
    for path in ((), (3,)):
        history = prompt.with_path(path)
        assert np.flatnonzero(np.isneginf(process_logits(scores, params, history)[[1, 3]])).tolist() == [0, 1]
        assert sample_token(scores, params, history, noise) == 2
    assert sample_token(scores, params, prompt.with_path((3, 0)), noise) == 1
    prompt.extend([0])
    assert sample_token(scores, params, prompt, noise) == 2
    assert sample_token(scores, params, prompt.with_path((0,)), noise) == 1


def test_holding_everything_back_leaves_no_token() -> None:
    with pytest.raises(EmptySupport, match="no token"):
        sample_token(
            logits(1, 2), SamplingParams(temperature=0, min_tokens=1, stop_ids=(0, 1)), NOTHING, None
        )


@given(
    values=st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=30),
    top=st.integers(0, 20),
    data=st.data(),
)
def test_logprobs_are_a_log_softmax_and_its_largest(
    values: list[float], top: int, data: st.DataObject
) -> None:
    token = data.draw(st.integers(0, len(values) - 1))
    found = token_logprob(logits(*values), token, top)
    normaliser = math.log(math.fsum(math.exp(value) for value in values))
    assert found.logprob == pytest.approx(values[token] - normaliser, abs=1e-6)
    order = sorted(range(len(values)), key=lambda id_: (-(values[id_] - normaliser), id_))[:top]
    assert list(found.top_ids) == order
    assert list(found.top_logprobs) == pytest.approx([values[id_] - normaliser for id_ in order], abs=1e-4)


def test_what_has_no_probability_is_not_among_the_likeliest() -> None:
    found = token_logprob(logits(-math.inf, 1, -math.inf, 1), 3, 4)
    assert list(found.top_ids) == [1, 3]
    assert found.logprob == pytest.approx(-math.log(2))


@pytest.mark.parametrize("kept", [0.0005, 0.01, 0.5, 1.0])
@pytest.mark.parametrize("top", [1, 5, 20])
def test_the_likeliest_of_a_row_that_cuts_have_thinned_are_those_of_a_sort(kept: float, top: int) -> None:
    rng = np.random.default_rng(top)
    row = np.round(rng.normal(size=5000) * 3).astype(np.float32)
    row[rng.random(5000) >= kept] = -np.inf
    row[17] = 1.0
    order = sorted(np.flatnonzero(row > -np.inf).tolist(), key=lambda id_: (-float(row[id_]), id_))
    assert list(token_logprob(row, 17, top).top_ids) == order[:top]
    listed = HostDigest(row).likeliest(top)
    assert set(order[:top]) <= set(listed.ids.tolist())
    assert float(row[listed.ids].min()) >= listed.bound
    assert len(listed.ids) == np.count_nonzero(row >= listed.bound)


def test_the_callers_logits_stay_as_they_are() -> None:
    values = np.array([1.0, 2.0, 3.0])
    for fields in EACH_FIELD:
        fields = {name: value for name, value in fields.items() if name != "logit_bias"}
        sample_token(values, SamplingParams(**fields), History.of([1, 2], 1), np.zeros(3))
    assert values.tolist() == [1.0, 2.0, 3.0]


def test_top_k_keeps_the_lowest_ids_of_equals() -> None:
    assert kept([1, 2, 2, 2, 0], top_k=2) == [1, 2]
    assert kept([5, 2, 2, 2, 9], top_k=3) == [0, 1, 4]
    assert kept([1, 1, 1], top_k=3) == [0, 1, 2]


def test_top_p_keeps_the_token_that_crosses_it() -> None:
    quarters = [math.log(share) for share in (0.125, 0.5, 0.125, 0.25)]
    assert kept(quarters, top_p=0.4) == [1]
    assert kept(quarters, top_p=0.51) == [1, 3]
    assert kept(quarters, top_p=0.76) == [0, 1, 3]
    assert kept(quarters, top_p=0.9) == [0, 1, 2, 3]
    assert kept([0.0] * 8, top_p=0.5) == [0, 1, 2, 3]
    assert kept([0.0] * 8, top_p=1e-9) == [0]


def test_min_p_is_a_share_of_the_likeliest() -> None:
    quarters = [math.log(share) for share in (0.125, 0.5, 0.125, 0.25)]
    assert kept(quarters, min_p=0.3) == [1, 3]
    assert kept(quarters, min_p=0.2) == [0, 1, 2, 3]
    assert kept(quarters, min_p=1.0) == [1]


def test_a_later_cut_sees_what_an_earlier_one_left() -> None:
    shares = [math.log(share) for share in (0.4, 0.3, 0.2, 0.1)]
    assert kept(shares, top_p=0.55) == [0, 1]
    assert kept(shares, top_k=2, top_p=0.55) == [0]  # 0.4 of the 0.7 left crosses it
    assert kept(shares, top_k=3, min_p=0.6) == [0, 1]


def test_temperature_comes_before_the_cuts() -> None:
    shares = [math.log(share) for share in (0.6, 0.3, 0.1)]
    assert kept(shares, top_p=0.5) == [0]
    assert kept(shares, top_p=0.5, temperature=10) == [0, 1]


@pytest.mark.parametrize("size", [50, 4096])
@pytest.mark.parametrize("spread", [0.01, 1.0, 5.0])
@given(seed=st.integers(0, 2**32))
def test_cuts_agree_with_sorting_everything(size: int, spread: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    values: NDArray[np.float64] = np.round(rng.normal(size=size) * spread, 2)  # rounding makes ties
    top_k, top_p = int(rng.integers(1, size)), float(rng.uniform(0.05, 0.999))
    order = np.lexsort((np.arange(size), -values))
    assert kept(values.tolist(), top_k=top_k) == sorted(order[:top_k].tolist())
    weights = np.exp(values[order] - values.max())
    count = int(np.searchsorted(np.cumsum(weights), top_p * weights.sum())) + 1
    assert abs(len(kept(values.tolist(), top_p=top_p)) - count) <= 1
    assert set(kept(values.tolist(), top_p=top_p)) <= set(order[: count + 1].tolist())


def test_ties_go_to_the_lowest_id() -> None:
    flat = np.zeros(5)
    assert sample_token(logits(1, 3, 3, 2), SamplingParams(temperature=0), NOTHING, None) == 1
    assert sample_token(logits(3, 3, 3, 3), SamplingParams(), NOTHING, flat[:4]) == 0
    assert sample_token(logits(0, 1, 1, 1, 0), SamplingParams(top_k=2), NOTHING, flat) == 1


def test_greedy_takes_penalties_and_bias_but_no_cuts() -> None:
    params = SamplingParams(temperature=0, presence_penalty=2.0, logit_bias=((0, 0.5),), top_k=1, top_p=0.1)
    history = History.of([9, 1], 1)
    assert process_logits(logits(1, 3, 1.4), params, history).tolist() == [
        1.5,
        1.0,
        np.float64(np.float32(1.4)),
    ]
    assert sample_token(logits(1, 3, 1.4), params, history, None) == 0


@pytest.mark.parametrize(
    "fields", [*EACH_FIELD, {"temperature": 0}, {"temperature": 0, "presence_penalty": 1.0}]
)
@pytest.mark.parametrize("bad", [[math.nan, 1.0], [1.0, math.nan], [-math.inf, -math.inf], [math.inf, 0.0]])
def test_logits_that_leave_nothing_to_choose_are_an_error(fields: dict[str, Any], bad: list[float]) -> None:
    fields = {name: value for name, value in fields.items() if name != "logit_bias"}
    with pytest.raises(EmptySupport):
        sample_token(logits(*bad), SamplingParams(**fields), History.of([1], 0), np.zeros(2))


def test_a_masked_token_is_never_chosen() -> None:
    row = np.array([40.0, -3.0, -3.0])
    for fields in EACH_FIELD:
        fields = {name: value for name, value in fields.items() if name != "logit_bias"}
        assert sample_token(logits(-np.inf, 0, 1), SamplingParams(**fields), History.of([0], 0), row) != 0


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("fields", [{}, {"temperature": 0.63}, {"temperature": 0}])
def test_the_fast_paths_choose_as_the_long_one(dtype: type, fields: dict[str, Any]) -> None:
    rng = np.random.default_rng(3)
    params = SamplingParams(**fields)
    for position in range(200):
        values: NDArray[Any] = (rng.normal(size=96) * 4).astype(dtype)
        row = gumbel(1, position, 96)
        long_way = process_logits(values, params, NOTHING) + (0 if params.greedy else row)
        assert sample_token(values, params, NOTHING, row) == int(np.argmax(long_way))


@pytest.fixture(scope="module")
def noise_rows() -> list[NDArray[np.float64]]:
    """20,000 positions of one seed, twelve ids wide."""
    return [gumbel(77, position, 12) for position in range(20_000)]


@pytest.mark.parametrize("fields", EACH_FIELD)
def test_choose_samples_the_softmax_of_the_processed_logits(
    fields: dict[str, Any],
    noise_rows: list[NDArray[np.float64]],
    assert_law: Callable[[Sequence[int], NDArray[np.float64]], None],
) -> None:
    params, history = SamplingParams(**fields), History.of([1, 2, 2, 3, 3, 3], 2)
    values = (np.random.default_rng(8).normal(size=12) * 1.5).astype(np.float32)
    chosen = [sample_token(values, params, history, row) for row in noise_rows]
    assert_law(chosen, process_logits(values, params, history))


def test_neighbouring_positions_choose_independently(chi_square_limit: Callable[[int], float]) -> None:
    values = np.log(np.array([0.5, 0.3, 0.2]))
    positions = 20_000
    chosen = [sample_token(values, SamplingParams(), NOTHING, gumbel(5, t, 3)) for t in range(2 * positions)]
    pairs = np.bincount([3 * a + b for a, b in zip(chosen[::2], chosen[1::2], strict=True)], minlength=9)
    expected = positions * np.outer([0.5, 0.3, 0.2], [0.5, 0.3, 0.2]).ravel()
    assert float(((pairs - expected) ** 2 / expected).sum()) < chi_square_limit(8)
