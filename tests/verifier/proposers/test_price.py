"""How deep a batched proposer drafts: as deep as its milliseconds pay."""

import math

import pytest

from verifier_service.proposers.price import ProposerPrice, ProposerPrices


def taught(*levels: tuple[float, float], seeing_ms: float = 0.0) -> ProposerPrice:
    """A price that has seen these levels (ms, survival gained) often, over one session."""
    price = ProposerPrice()
    for _ in range(100):
        for level, (ms, gain) in enumerate(levels):
            price.computed(level, ms, gain, sessions=1)
        price.seeing.learn(1, seeing_ms)
    return price


def begun(price: ProposerPrice, steps: int, tokens_per_ms: float, sessions: int = 1) -> list[bool]:
    return [price.begins(sessions, tokens_per_ms) for _ in range(steps)]


def test_an_unknown_level_is_tried() -> None:
    assert ProposerPrice().pays(0, 1, 1.0)
    assert taught((1.0, 0.5)).pays(1, 1, 1.0, before=0.5)


def test_a_level_pays_where_its_gain_exceeds_what_its_time_would_yield() -> None:
    price = taught((2.0, 0.5))
    assert price.pays(0, 1, tokens_per_ms=0.2)
    assert not price.pays(0, 1, tokens_per_ms=0.3)
    assert price.pays(0, 8, tokens_per_ms=0.3), "one call serves all sessions"


def test_a_deeper_level_is_expected_to_gain_less_below_a_poor_one() -> None:
    price = taught((1.0, 0.8), (1.0, 0.4))
    assert price.pays(1, 1, 0.3, before=0.8)
    assert not price.pays(1, 1, 0.3, before=0.2)


def test_a_level_that_does_not_pay_is_the_way_to_one_that_does() -> None:
    price = taught((1.0, 0.1), (1.0, 0.9))
    assert price.pays(0, 1, tokens_per_ms=0.4)
    assert not taught((1.0, 0.1), (1.0, 0.1)).pays(0, 1, tokens_per_ms=0.4)


def test_calls_for_many_sessions_say_little_about_calls_for_one() -> None:
    price = taught((1.0, 0.5))
    for _ in range(100):
        price.computed(0, 6.0, 4.0, sessions=8)
    assert price.pays(0, 1, tokens_per_ms=0.4)
    assert not price.pays(0, 8, tokens_per_ms=0.8)
    assert price.pays(0, 8, tokens_per_ms=0.6)
    assert not price.pays(0, 9, tokens_per_ms=0.8), "the nearest number that is known"


def test_the_call_that_makes_up_for_a_rest_is_not_what_a_call_costs() -> None:
    price = taught((10.0, 0.1))
    while not price.rests:
        price.begins(1, 0.1)
    while not price.begins(1, 0.1):
        pass
    price.computed(0, 1.0, 0.9, sessions=1)
    assert not price.pays(0, 1, tokens_per_ms=0.05), "10 ms as before"
    price.computed(0, 1.0, 0.9, sessions=1)
    assert price.pays(0, 1, tokens_per_ms=0.02)


def test_what_other_sources_had_offered_is_no_gain() -> None:
    price = taught((1.0, 0.5))
    assert price.pays(0, 1, tokens_per_ms=0.3)
    price.own = 0.1
    assert not price.pays(0, 1, tokens_per_ms=0.3)
    assert price.pays(0, 1, tokens_per_ms=0.04)


def test_the_gain_of_a_millisecond_counts_all_levels_and_what_showing_passes_costs() -> None:
    assert ProposerPrice().gain_per_ms(1) == math.inf
    assert taught((1.0, 0.5), (1.0, 0.3)).gain_per_ms(1) == pytest.approx(0.4)
    assert taught((1.0, 0.5), (1.0, 0.3), seeing_ms=2.0).gain_per_ms(1) == pytest.approx(0.2, rel=1e-3)


def test_showing_passes_is_a_part_of_the_first_level_s_price() -> None:
    assert taught((1.0, 0.5)).pays(0, 1, 0.3)
    assert not taught((1.0, 0.5), seeing_ms=1.0).pays(0, 1, 0.3)


def test_one_that_does_not_pay_rests_longer_and_longer_and_is_tried_again() -> None:
    price = taught((10.0, 0.1))
    steps = begun(price, 5000, tokens_per_ms=0.1)
    assert not all(steps)
    rests = [len(run) for run in "".join("x" if asked else "-" for asked in steps).split("x") if run]
    expected = [17, 65, 257, 1025, 1025]
    assert rests[:5] == expected, "four times as long up to the longest; the step that decides is one of them"
    assert sum(steps) <= 50


@pytest.mark.parametrize(("step_ms", "longest"), [(0.0, 1024), (20.0, 1024), (2.0, 2500), (1.0, 5000)])
def test_a_rest_lasts_five_seconds_but_at_least_1024_steps(step_ms: float, longest: int) -> None:
    price, rests = taught((10.0, 0.1)), [0]
    for _ in range(30_000):
        if step_ms:
            price.measured.learn(1, False, 1, step_ms)
        rests = [*rests, 0] if price.begins(1, 0.1) else [*rests[:-1], rests[-1] + 1]
    assert max(rests) == longest + 1, "the step that decides is one of them"


def test_a_rest_that_began_in_quick_steps_is_no_longer_than_1024_slow_ones() -> None:
    price = taught((10.0, 0.1))
    while price.rest_left < 2000:
        price.measured.learn(1, False, 1, 1.0)
        price.begins(1, 0.1)
    price.measured.learn(8, False, 8, 20.0)
    price.begins(8, 0.1)
    assert price.rest_left == 1023


def test_one_that_rests_says_so_and_one_that_is_tried_does_not() -> None:
    price = taught((10.0, 0.1))
    while price.begins(1, 0.1):
        assert not price.rests
    assert price.rests
    while not price.begins(1, 0.1):
        pass
    assert not price.rests


def test_only_rests_of_256_steps_and_more_are_long_and_only_until_they_end() -> None:
    price = taught((10.0, 0.1))
    long = [price.rests_long for _ in range(5000) if not price.begins(1, 0.1)]
    assert long[:80] == [False] * 80, "rests of 16 and 64 steps"
    assert all(long[84:300])
    while not price.begins(1, 0.1):
        pass
    assert not price.rests_long


def test_a_proposer_rests_for_long_if_it_does_for_every_kind_of_step_that_there_was() -> None:
    prices = ProposerPrices()
    assert not prices.rests_long
    for greedy in (True, False):
        price = prices.of(greedy)
        assert not prices.rests_long
        price.computed(0, 10.0, 0.1, sessions=1)
        while not price.rests_long:
            price.begins(1, 0.1)
        assert prices.rests_long


def test_one_that_pays_again_is_asked_in_every_step() -> None:
    price = taught((10.0, 0.1))
    begun(price, 40, tokens_per_ms=0.1)
    for _ in range(200):
        price.computed(0, 0.1, 0.9, sessions=1)
    steps = begun(price, 300, tokens_per_ms=0.1)
    assert all(steps[64:])


def test_a_level_that_does_not_pay_is_tried_again_so_that_a_slow_first_call_is_forgotten() -> None:
    price = ProposerPrice()
    price.computed(0, 0.5, 0.9, sessions=1)
    price.computed(1, 40.0, 0.5, sessions=1)
    asked = 0
    for _ in range(400):
        if price.deepens(1, 1, tokens_per_ms=0.4, before=0.9):
            asked += 1
            price.computed(1, 0.5, 0.5, sessions=1)
    assert asked > 300


def test_a_level_that_never_pays_is_tried_seldom() -> None:
    price = taught((0.5, 0.9), (5.0, 0.1))
    assert sum(price.deepens(1, 1, 0.4, before=0.9) for _ in range(700)) <= 30


def test_a_call_that_was_interrupted_says_little() -> None:
    price = taught((1.0, 0.5))
    price.computed(0, 90.0, 0.5, sessions=1)
    price.seeing.learn(1, 50.0)
    assert price.pays(0, 1, tokens_per_ms=0.4)


def test_one_that_does_not_pay_for_sampled_steps_goes_on_drafting_for_greedy_ones() -> None:
    prices = ProposerPrices()
    assert prices.resting == {}
    for gain, greedy in ((0.9, True), (0.05, False)):
        price = prices.of(greedy)
        for _ in range(40):
            if price.begins(1, 0.2):
                price.computed(0, 1.0, gain, sessions=1)
    assert prices.resting == {"greedy": False, "sampled": True}
    prices.saw(9.0, sessions=1)
    assert not prices.of(True).pays(0, 1, 0.2), "whatever the steps, passes take as long to be shown"
