"""Draft policies: each one's rule, their names, and what they share over sessions."""

import math
import re

import numpy as np
import pytest

from speculative.errors import InvalidRequest
from speculative.policies.book import PolicyBook
from speculative.policies.entropy import entropy_of
from speculative.policies.names import DEFAULT_POLICY, POLICIES, checked_policy, policy_choice
from speculative.policies.policy import (
    DraftLimits,
    DraftPoint,
    DraftPolicy,
    Guess,
    JudgedPlace,
    SeenProgress,
)

BOUNDS = DraftLimits(depth=32, floor=0.01, nodes=64, children=4)


def opened(text: str) -> DraftPolicy:
    return PolicyBook(text, BOUNDS).open()


def round_of(right: int, *, missed: bool = True, probability: float = 0.7, ms: float = 0.0) -> SeenProgress:
    """A round with `right` accepted places, and one wrong place behind them."""
    hits = [JudgedPlace(depth, (Guess(probability, True),)) for depth in range(1, right + 1)]
    miss = [JudgedPlace(right + 1, (Guess(probability, False),))] if missed else []
    return SeenProgress(right + 1, (*hits, *miss), ms)


@pytest.mark.parametrize("name", POLICIES)
def test_no_policy_goes_beyond_the_service_s_bounds(name: str) -> None:
    policy = opened(name)
    for right in (0, 3, 20, 31, 0, 0, 31, 31, 31):
        policy.saw(round_of(right, missed=right < 31, ms=5.0))
        limits = policy.limits
        assert 1 <= limits.depth <= BOUNDS.depth
        assert limits.floor >= BOUNDS.floor
        assert limits.nodes <= BOUNDS.nodes
        assert limits.children <= BOUNDS.children
        assert 0 <= policy.estimate(0.999, 3, 0.1) <= 1


@pytest.mark.parametrize("text", ["best", "fixed:0", "fixed:x", "confidence:1.5", "fixed:nan", "FIXED", " "])
def test_a_wrong_name_is_refused_with_the_names_or_the_range(text: str) -> None:
    name = text.partition(":")[0]
    said = "takes its" if name in POLICIES else ", ".join(POLICIES)
    with pytest.raises(InvalidRequest, match=re.escape(said)):
        checked_policy(text)


@pytest.mark.parametrize("text", ["fixed:" + "0" * 1000 + "4", "fixed:1_0", "fixed:\u0663", "fixed: 4 "])
def test_a_number_is_short_and_plain(text: str) -> None:
    with pytest.raises(InvalidRequest, match="policy"):
        checked_policy(text)


def test_a_threshold_stays_a_probability() -> None:
    policy = opened("moving")
    for missed in (False, True):
        for _ in range(2000):
            policy.saw(round_of(0 if missed else 8, missed=missed))
        assert policy.goes_on(DraftPoint(1, 1.0, 1.0))
    for _ in range(700):
        policy.saw(round_of(8, missed=False))
    assert policy.goes_on(DraftPoint(1, 0.5, 0.5)), "a long run of misses is not paid for for ever"


def test_a_name_may_come_with_a_number() -> None:
    assert checked_policy("") == ""
    assert policy_choice("fixed") == ("fixed", 5)
    assert policy_choice("fixed:3") == ("fixed", 3)
    assert opened("fixed:3").limits.depth == 3
    assert opened("fixed:200").limits.depth == BOUNDS.depth


def test_the_heuristic_lengthens_after_full_acceptance_and_shortens_after_a_miss() -> None:
    policy = opened("heuristic")
    assert policy.limits.depth == 5
    policy.saw(round_of(5, missed=False))
    assert policy.limits.depth == 7
    policy.saw(round_of(2))
    assert policy.limits.depth == 6
    policy.saw(SeenProgress(1, ()))
    assert policy.limits.depth == 6, "no draft was there to be right or wrong"
    for _ in range(20):
        policy.saw(round_of(0))
    assert policy.limits.depth == 1


def test_a_confidence_threshold_ends_paths_behind_doubtful_tokens() -> None:
    policy = opened("confidence:0.5")
    assert policy.goes_on(DraftPoint(4, 0.5, 0.06))
    assert not policy.goes_on(DraftPoint(1, 0.49, 0.49))


def test_a_moving_threshold_rises_with_rejection_and_falls_with_acceptance() -> None:
    strict, lenient = opened("moving:0.5"), opened("moving:0.5")
    for _ in range(50):
        strict.saw(round_of(1))
        lenient.saw(round_of(8, missed=False))
    point = DraftPoint(1, 0.5, 0.5)
    assert not strict.goes_on(point)
    assert lenient.goes_on(DraftPoint(1, 0.47, 0.47))


def test_the_entropy_bound_stops_where_the_distribution_is_flat() -> None:
    policy = opened("entropy:0.3")
    assert policy.reads_entropy
    assert policy.drafts_after(0.0)
    assert policy.drafts_after(2.4), "1 - sqrt(0.2 * 2.4) is 0.31"
    assert not policy.drafts_after(2.5), "1 - sqrt(0.2 * 2.5) is 0.29"


@pytest.mark.parametrize(
    ("logits", "nats"), [([0.0] * 8, math.log(8)), ([5.0, -math.inf], 0.0), ([-math.inf] * 2, 0.0)]
)
def test_entropy_is_that_of_the_softmax(logits: list[float], nats: float) -> None:
    assert entropy_of(np.array(logits, np.float32)) == pytest.approx(nats)


def test_a_learnt_stop_begins_with_the_source_s_estimate_and_learns_the_truth() -> None:
    policy = opened("learnt:0.9")
    assert policy.limits.floor == pytest.approx(0.1)
    assert policy.estimate(0.8, 1, 0.0) == pytest.approx(0.8)
    for number in range(4000):
        trials = (
            JudgedPlace(1, (Guess(0.8, number % 4 == 0),)),
            JudgedPlace(1, (Guess(0.3, number % 10 == 0),)),
        )
        policy.saw(SeenProgress(1, trials))
    assert policy.estimate(0.8, 1, 0.0) == pytest.approx(0.25, abs=0.06)
    assert policy.estimate(0.3, 1, 0.0) == pytest.approx(0.10, abs=0.06)


def test_a_bandit_settles_on_the_depth_that_earns_most_and_sessions_share_it() -> None:
    book = PolicyBook("bandit", BOUNDS)
    earned = {1: 0.2, 2: 0.3, 4: 0.5, 8: 0.4, 16: 0.3, 32: 0.1}
    pulled = []
    for _ in range(40):  # short sessions: none of them could try every depth
        policy = book.open()
        for _ in range(8):
            depth = policy.limits.depth
            pulled.append(depth)
            policy.saw(SeenProgress(int(100 * earned[depth]), (), ms=100.0))
    assert set(pulled) == set(earned)
    last = pulled[-80:]
    assert last.count(4) == max(last.count(depth) for depth in earned)
    assert last.count(4) > 40


def test_a_bandit_takes_a_long_pause_for_no_price() -> None:
    book = PolicyBook("bandit", BOUNDS)
    policy = book.open()
    first = policy.limits.depth
    for _ in range(10):
        policy.saw(SeenProgress(1, (), ms=60_000.0))
    assert policy.limits.depth == first


def test_the_default_shortens_where_places_are_not_reached_and_lengthens_again() -> None:
    policy = opened(DEFAULT_POLICY)
    assert policy.limits == BOUNDS, "nothing is known yet"
    for _ in range(60):
        policy.saw(round_of(0))
    short = policy.limits.depth
    assert short <= 3
    for _ in range(200):
        policy.saw(round_of(31, missed=False))
    assert policy.limits.depth == BOUNDS.depth


def test_sources_of_one_worker_learn_apart() -> None:
    book = PolicyBook("learnt", BOUNDS)
    first, second = book.open(source="lookup"), book.open(source="prediction")
    for _ in range(500):
        first.saw(round_of(0, probability=0.8))
    assert second.estimate(0.8, 1, 0.0) == pytest.approx(0.8)
    assert book.open(source="lookup").estimate(0.8, 1, 0.0) < 0.5
