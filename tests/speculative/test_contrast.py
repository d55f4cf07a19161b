"""Contrastive logits are what the formula over two models' log-probabilities says."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from speculative.contrast import DROPPED, Contrast, contrasted
from speculative.errors import InvalidRequest
from speculative.params import SamplingParams

HALF = Contrast(0.5, 0.1)
INF = math.inf


def row(*logits: float) -> np.ndarray:
    return np.array(logits, dtype=np.float32)


def chosen_from(made: np.ndarray) -> np.ndarray:
    """Which ids have any probability at all."""
    return np.asarray(made > made.max() - DROPPED / 2)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - float(logits.max())
    return shifted - math.log(float(np.exp(shifted).sum()))


@given(
    st.lists(st.tuples(st.floats(-8, 8, width=32), st.floats(-8, 8, width=32)), min_size=1, max_size=12),
    st.floats(0.01, 10),
    st.floats(0.001, 1),
)
def test_it_is_the_formula_over_log_probabilities(
    pairs: list[tuple[float, float]], strength: float, plausibility: float
) -> None:
    expert, amateur = (row(*column) for column in zip(*pairs, strict=True))
    made = contrasted(expert, amateur, Contrast(strength, plausibility))

    own, other = log_softmax(expert), log_softmax(amateur)
    kept = chosen_from(made)
    edge = np.abs(own - own.max() - math.log(plausibility)) < 1e-5
    assert ((own - own.max() >= math.log(plausibility)) == kept)[~edge].all()
    expected = ((1 + strength) * own - strength * other)[kept]
    if kept.any():
        np.testing.assert_allclose(made[kept] - made[kept].max(), expected - expected.max(), atol=1e-4)


def test_what_the_amateur_likes_falls_behind() -> None:
    assert contrasted(row(2.0, 1.9, 0.0), row(3.0, 0.0, 0.0), HALF).argmax() == 1


def test_an_id_that_the_expert_finds_implausible_is_dropped_however_little_the_amateur_likes_it() -> None:
    made = contrasted(row(5.0, 4.9, 2.0), row(9.0, 9.0, -30.0), Contrast(10.0, 0.1))
    assert chosen_from(made).tolist() == [True, True, False]


def test_plausibility_of_one_leaves_the_likeliest_ids() -> None:
    made = contrasted(row(1.0, 3.0, 3.0), row(0.0, 5.0, 0.0), Contrast(2.0, 1.0))
    assert chosen_from(made).tolist() == [False, True, True]


def test_where_nothing_plausible_is_allowed_the_expert_decides() -> None:
    """As under a grammar, which bans ids after the contrast."""
    made = contrasted(row(9.0, 1.0, 3.0, 2.0), row(0.0, -9.0, 5.0, 0.0), HALF)
    made[0] = -INF
    assert np.argsort(-made)[:3].tolist() == [2, 3, 1]
    assert made[2] - made[1] == pytest.approx(2.0, abs=0.01)


def test_ids_that_the_amateur_does_not_know_are_dropped() -> None:
    made = contrasted(row(1.0, 2.0, 9.0, 9.5), row(0.0, 0.0, 0.0), HALF)
    assert chosen_from(made).tolist() == [False, False, True, False]
    assert contrasted(row(1.0, 2.0), row(0.0, 0.0, 7.0), HALF).tolist() == [1.5, 3.0]


def test_an_id_without_any_probability_counts_as_the_amateurs_least_likely_one() -> None:
    impossible = contrasted(row(1.0, 1.5, 1.0), row(-INF, 2.0, -3.0), HALF)
    least = contrasted(row(1.0, 1.5, 1.0), row(-3.0, 2.0, -3.0), HALF)
    assert impossible.tolist() == least.tolist()
    assert np.isfinite(contrasted(row(1.0, 1.5), row(-INF, -INF), HALF)).all()


@pytest.mark.parametrize(
    ("expert", "amateur"), [(row(math.nan, 1.0), row(0.0, 0.0)), (row(INF, 1.0), row(0.0, 0.0))]
)
def test_a_broken_row_of_the_expert_stays_broken(expert: np.ndarray, amateur: np.ndarray) -> None:
    np.testing.assert_array_equal(contrasted(expert, amateur, HALF), expert)


def test_a_broken_row_of_the_amateur_shows() -> None:
    assert np.isnan(contrasted(row(1.0, 1.0), row(math.nan, 0.0), HALF)).any()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("contrast_strength", -0.1),
        ("contrast_strength", 11.0),
        ("contrast_plausibility", 0.0),
        ("contrast_plausibility", 1.5),
        ("contrast_plausibility", math.nan),
    ],
)
def test_parameters_out_of_range_are_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(InvalidRequest, match=f"{name} is"):
        SamplingParams(**{name: value})


def test_no_strength_is_no_contrast() -> None:
    assert SamplingParams().contrast is None
    assert SamplingParams(contrast_strength=0.5).contrast == HALF
