"""What a drafter draws from: rounded first, then drawn from exactly."""

from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from speculative.draft_law import MOST_IDS, UNIT, DraftLaws, QuantisedLaw, quantise
from speculative.errors import EmptySupport
from speculative.noise import accept_uniform, draft_word
from speculative.params import SamplingParams


def law_of(*weights: int) -> QuantisedLaw:
    return QuantisedLaw(np.arange(len(weights)) * 3, np.array(weights))


@pytest.mark.parametrize("weights", [(UNIT,), (1, UNIT - 1), (20_000, 30_000, 15_536), (1, 1, 1, UNIT - 3)])
def test_of_all_sixteen_bit_numbers_each_id_gets_its_weight(weights: tuple[int, ...]) -> None:
    """So a token's probability is its weight over 65536, with nothing rounded."""
    law = law_of(*weights)
    edges = np.cumsum([0, *weights])
    for place, (low, high) in enumerate(pairwise(edges)):
        for top in {int(low), int(high) - 1}:
            for rest in (0, (1 << 48) - 1):
                word = top << 48 | rest
                assert law.draw(1, iter([word]).__next__, distinct=False) == [3 * place]


def test_float64_holds_every_probability_exactly() -> None:
    law = law_of(1, 3, 65_532)
    assert [Fraction(weight) for weight in law.law.weights.tolist()] == [
        Fraction(weight, UNIT) for weight in (1, 3, 65_532)
    ]


def test_distinct_draws_are_from_what_the_ones_before_left() -> None:
    law = law_of(UNIT // 2, UNIT // 4, UNIT // 4)
    words = iter([0, 0, 0, 0])
    assert law.draw(5, lambda: next(words), distinct=True) == [0, 3, 6], "the support runs out"
    words = iter([0, (1 << 64) - 1])
    assert law.draw(2, lambda: next(words), distinct=True) == [0, 6]
    words = iter([0, 1 << 63])
    assert law.draw(2, lambda: next(words), distinct=True) == [0, 6], "half of what is left is the first's"


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("spread", [0.1, 1.0, 8.0])
def test_rounding_is_within_its_stated_bounds(seed: int, spread: float) -> None:
    scores = np.random.default_rng(seed).standard_normal(500) * spread
    p = np.exp(scores - scores.max())
    law = quantise(p)
    assert law.weights.sum() == UNIT
    assert len(law.ids) <= MOST_IDS
    likeliest = np.sort(np.argsort(-p)[:MOST_IDS])
    kept = np.zeros(500)
    kept[likeliest] = p[likeliest] / p[likeliest].sum()
    rounded = np.zeros(500)
    rounded[law.ids] = law.law.weights
    off = np.abs(rounded - kept)
    best = int(p.argmax())
    assert off[best] <= 2.0**-11
    assert np.delete(off, best).max() <= 2.0**-17 + 1e-12
    assert off.sum() / 2 < 2.0**-11


def test_the_law_is_that_of_the_requests_own_parameters() -> None:
    logits = np.array([0.0, 1.0, 2.0, 3.0, 4.0], np.float32)
    params = SamplingParams(temperature=0.5, top_k=2, presence_penalty=10.0, logit_bias=((9, 5.0),))
    laws = DraftLaws(params, (1, 2), 2, width=5, bound=5)
    assert laws.after(logits, ()).ids.tolist() == [3, 4]
    assert laws.after(logits, (4,)).ids.tolist() == [2, 3], "a drafted token counts as output"
    laws.push((3,))
    assert laws.after(logits, ()).ids.tolist() == [2, 4]
    share = 1 / (1 + np.exp(-4.0))
    assert laws.after(logits, ()).law.weights[1] == pytest.approx(share, abs=1e-4)


def test_greedy_decoding_has_one_id_and_unknown_ids_have_none() -> None:
    logits = np.array([0.0, 3.0, 3.0, 1.0], np.float32)
    greedy = DraftLaws(SamplingParams(temperature=0), (1,), 1, width=4, bound=4)
    assert greedy.after(logits, ()).ids.tolist() == [1]
    bounded = DraftLaws(SamplingParams(temperature=1), (1,), 1, width=4, bound=1)
    assert bounded.after(logits, ()).ids.tolist() == [0]
    with pytest.raises(EmptySupport):
        greedy.after(np.full(4, np.nan, np.float32), ())


def test_nothing_to_draw_is_id_0_so_that_no_window_ends_by_what_was_drawn() -> None:
    assert quantise(np.zeros(4)).ids.tolist() == [0]


@pytest.mark.parametrize(
    ("ids", "weights", "said"),
    [
        ([1, 1], [1, UNIT - 1], "do not ascend"),
        ([-1, 1], [1, UNIT - 1], "do not ascend"),
        ([0, 1], [0, UNIT], "at least 1"),
        ([0, 1], [-1, UNIT + 1], "at least 1"),
        ([0], [UNIT - 1], "sum to 65536"),
        ([], [], "0 ids"),
    ],
)
def test_what_is_no_distribution_is_malformed(ids: list[int], weights: list[int], said: str) -> None:
    with pytest.raises(Exception, match=said):
        QuantisedLaw(np.array(ids, np.int64), np.array(weights, np.int64))


def test_numbers_of_draws_are_nobody_elses() -> None:
    words: set[Any] = {draft_word(7, base, index) for base in range(20) for index in range(20)}
    assert len(words) == 400
    assert draft_word(7, 3, 5) != draft_word(8, 3, 5)
    assert accept_uniform(7, 3, 5) != ((draft_word(7, 3, 5) >> 12) + 0.5) * 2.0**-52
