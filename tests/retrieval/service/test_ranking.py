"""How likely a memory's continuations are: by counts when greedy, with the session's own noise when not."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrieval_service.ranking import DraftShape, Noise, chances
from speculative.noise import gumbel

SHAPE = DraftShape()


def test_greedily_the_more_frequent_is_likelier_than_its_share() -> None:
    common, rare = chances([0.75, 0.25], 4, None, SHAPE)
    assert common > 0.75 > 0.25 > rare
    assert common + rare == pytest.approx(1)


def test_the_noise_of_many_tokens_is_that_of_each() -> None:
    noise = Noise(11, 40, [(0, 5), (3, 9), (0, 5), (0, 7)])
    assert noise.at(0, [7, 5]) == [gumbel(11, 40, 10)[7], gumbel(11, 40, 10)[5]]
    assert noise.at(3, [9]) == [gumbel(11, 43, 10)[9]]


def test_with_noise_the_rarer_wins_where_the_noise_wants_it() -> None:
    for seed in range(60):
        noise = Noise(seed, 40, [(0, 5), (0, 9)]).at(0, [5, 9])
        common, rare = chances([3 / 5, 2 / 5], 5, noise, SHAPE)
        assert (common > rare) == (math.log(3 / 5) + noise[0] > math.log(2 / 5) + noise[1])


def test_the_chance_with_noise_is_how_often_the_target_takes_it() -> None:
    shares = np.array([0.45, 0.25, 0.2, 0.1])  # the last was never seen
    shape = DraftShape(softness=0.05, unseen=0.0)
    accepted, expected, first = [], [], []
    for seed in range(3000):
        noise = gumbel(seed, 40, 4)
        took = int((np.log(shares) + noise).argmax())
        found = chances(shares[:3].tolist(), 100, noise[:3].tolist(), shape)
        best = int(np.argmax(found))
        accepted.append(took == best)
        expected.append(found[best])
        first.append(took == 0)
    assert np.mean(accepted) > np.mean(first) + 0.2, "it foresees what counts alone cannot"
    assert np.mean(expected) == pytest.approx(np.mean(accepted), abs=0.03)
    sure = np.array(expected) > 0.95
    assert np.mean(np.array(accepted)[sure]) > 0.95 > np.mean(np.array(accepted)[~sure])


@given(
    counts=st.lists(st.integers(1, 20), min_size=1, max_size=6),
    unread=st.integers(0, 5),
    noise=st.one_of(st.none(), st.lists(st.floats(-4, 30), min_size=6, max_size=6)),
)
def test_chances_are_probabilities(counts: list[int], unread: int, noise: list[float] | None) -> None:
    total = sum(counts) + unread
    drawn = None if noise is None else noise[: len(counts)]
    found = chances([count / total for count in counts], total, drawn, SHAPE)
    assert all(0 <= chance <= 1 for chance in found)
    assert sum(found) <= 1 + 1e-9
