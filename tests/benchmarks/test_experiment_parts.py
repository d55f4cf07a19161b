"""Parts of experiments: losses are what they are called, rounds keep ids, clocks add up."""

import numpy as np
import pytest
import torch

from benchmarks.criteria import Arm
from benchmarks.experiments.alignment.pupils import (
    LOSSES,
    forward_kl,
    jensen_shannon,
    reverse_kl,
    total_variation,
)
from benchmarks.experiments.alignment.two_drafters import together
from benchmarks.experiments.applications.contrastive import contrasted
from benchmarks.experiments.applications.pixels import PixelPair, paint, pictures, plain
from benchmarks.experiments.applications.speculative_retrieval import (
    INTERVAL,
    TOKEN_MS,
    milliseconds,
    overlapped,
)
from benchmarks.experiments.several_drafts import gain
from benchmarks.experiments.verification.rules import MATCH, WINDOWS, errors, means
from benchmarks.experiments.verification.strictness import ARMS, label_of
from training.model import LlamaShape, build


def logs(*weights: float) -> torch.Tensor:
    return torch.tensor([weights]).log()


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_zero_for_equal_distributions_and_positive_for_others(name: str) -> None:
    one, other = logs(0.5, 0.3, 0.2), logs(0.2, 0.3, 0.5)

    assert LOSSES[name](one, one).item() == pytest.approx(0.0, abs=1e-6)
    assert LOSSES[name](one, other).item() > 0.01


def test_losses_are_the_divergences_that_they_are_called() -> None:
    p, q = logs(0.75, 0.25), logs(0.5, 0.5)

    assert forward_kl(p, q).item() == pytest.approx(0.75 * np.log(1.5) + 0.25 * np.log(0.5))
    assert reverse_kl(p, q).item() == pytest.approx(forward_kl(q, p).item())
    assert total_variation(p, q).item() == pytest.approx(0.25)
    assert jensen_shannon(p, q).item() == pytest.approx(jensen_shannon(q, p).item())


def test_two_drafters_take_turns_and_name_no_token_twice() -> None:
    assert together([1, 2, 3], [1, 4, 5], 1) == {1}
    assert together([1, 2, 3], [1, 4, 5], 3) == {1, 2, 4}
    assert together([1, 2, 3], [1, 2, 3], 3) == {1, 2, 3}


def test_contrast_prefers_what_the_amateur_finds_unlikely_among_likely_tokens() -> None:
    expert = np.log(np.array([0.5, 0.46, 0.04], dtype=np.float32))
    amateur = np.log(np.array([0.8, 0.1, 0.1], dtype=np.float32))

    assert contrasted(expert, amateur, 0.0) == 0
    assert contrasted(expert, amateur, 0.5) == 1
    assert contrasted(expert, np.log(np.array([0.9, 0.0999, 1e-4], dtype=np.float32)), 1.0) != 2


def test_squares_of_a_photograph_are_rows_of_levels_behind_one_beginning() -> None:
    grey = np.linspace(0, 1, 16 * 24).reshape(16, 24)

    found = pictures(grey, 8)

    assert found.shape == (6, 65)
    assert set(found[:, 0]) == {17}
    assert (found[:, 1:].min(), found[:, 1:].max()) == (0, 16)


@pytest.mark.parametrize("seed", [None, 5])
def test_drafted_pixels_without_tolerance_are_the_targets_own(seed: int | None) -> None:
    shape = LlamaShape(1, 32, 1, 1, 32, 32, vocabulary=18, context=65)
    target, drafter = (build(shape, 17, seed=number).eval() for number in (1, 2))
    pair = PixelPair(target, drafter, np.zeros((0, 65), dtype=np.int64))
    given = np.array([17, *range(8)])

    done = paint(pair, given.tolist(), seed, 0)

    assert done.ids == plain(pair, given, seed)
    assert len(done.by_place) == 56
    assert sum(done.by_place) + done.rounds >= 56


def test_a_drafter_that_is_the_target_drafts_whole_windows() -> None:
    shape = LlamaShape(1, 32, 1, 1, 32, 32, vocabulary=18, context=65)
    target = build(shape, 17, seed=1).eval()
    pair = PixelPair(target, target, np.zeros((0, 65), dtype=np.int64))

    assert paint(pair, [17, *range(8)], 3, 0).rounds == 7  # 56 pixels, 8 and one more at a time


def test_right_guesses_save_searches_and_wrong_ones_cost_an_interval() -> None:
    interval = INTERVAL * TOKEN_MS
    plain_ms = 4 * (interval + 100)

    assert milliseconds([False, True, True, True], 100, 3) == 4 * interval + 2 * 100
    assert milliseconds([False] * 4, 100, 1) == plain_ms + 3 * interval
    assert milliseconds([False], 100, 8) == interval + 100


def test_the_gain_of_a_tree_is_in_tokens_a_round() -> None:
    rows = [
        {"temperature": 0.0, "nodes": 4, "children": children, "accepted": accepted}
        for children, accepted in ((1, 1.0), (4, 2.0))
    ]

    assert gain(rows, 0.0, 4) == 1.5


def test_rules_are_compared_place_by_place() -> None:
    found = {MATCH: [1.0, 3.0, 2.0], "ratio": [2.0, 4.0, 3.0]}

    assert means(found) == {MATCH: 2.0, "ratio": 3.0}
    assert errors(found) == {"ratio": 0.0}


def test_every_window_draws_as_its_rules_need() -> None:
    for window in WINDOWS:
        for rule in window.rules:
            criterion, drawn = Arm(rule).criterion, window.arm.criterion
            needs = criterion is not None and criterion.needs_q
            assert needs == (drawn is not None and drawn.needs_q)


def test_arms_of_strictness_have_names_of_their_own() -> None:
    for arms in ARMS.values():
        names = [label_of(arm) for arm in arms]
        assert len(set(names)) == len(names)


def test_writing_while_a_search_runs_costs_the_longer_of_both_where_the_guess_is_right() -> None:
    interval = INTERVAL * TOKEN_MS

    assert overlapped([False, True, False], 100) == (100 + interval) + 100 + (100 + interval)
    assert overlapped([False, True], 1) == (1 + interval) + interval
