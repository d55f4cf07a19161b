"""Steps with a proposer's drafts are compared with steps without; trials do not coincide."""

import random

import pytest

from verifier_service.proposers.measured_gain import MeasuredGain
from verifier_service.proposers.price import ProposerPrice

SESSIONS = 8


def run(measured: MeasuredGain, asked: bool, steps: int, tokens: int, ms: float) -> None:
    for _ in range(steps):
        measured.learn(SESSIONS, asked, tokens, ms)


def test_a_proposer_whose_steps_yield_less_is_slower() -> None:
    measured = MeasuredGain()
    run(measured, False, 10, tokens=8, ms=20.0)
    run(measured, True, 10, tokens=12, ms=40.0)
    assert measured.is_slower(SESSIONS)
    assert not measured.is_slower(1), "nothing is known of steps with one session"


def test_a_proposer_whose_steps_yield_more_is_not() -> None:
    measured = MeasuredGain()
    run(measured, False, 10, tokens=8, ms=20.0)
    run(measured, True, 10, tokens=16, ms=35.0)
    assert not measured.is_slower(SESSIONS)


def test_steps_whose_sessions_all_failed_say_nothing() -> None:
    measured = MeasuredGain()
    for asked in (False, True):
        run(measured, asked, 20, tokens=0, ms=20.0)
    assert not measured.is_slower(SESSIONS)
    assert not measured.leaves_out(SESSIONS)


def test_few_steps_prove_nothing() -> None:
    measured = MeasuredGain()
    run(measured, False, 100, tokens=8, ms=20.0)
    run(measured, True, 8, tokens=8, ms=100.0)
    assert not measured.is_slower(SESSIONS), "the first of the eight made up for the rounds before"
    run(measured, True, 1, tokens=8, ms=100.0)
    assert measured.is_slower(SESSIONS)


def test_steps_after_a_rest_outweigh_steps_before_it() -> None:
    measured = MeasuredGain()
    run(measured, False, 500, tokens=8, ms=20.0)
    run(measured, True, 500, tokens=8, ms=40.0)
    run(measured, False, 17, tokens=8, ms=20.0)
    run(measured, True, 20, tokens=40, ms=40.0)
    assert not measured.is_slower(SESSIONS)


def test_a_slower_machine_is_no_fault_of_the_proposer() -> None:
    measured = MeasuredGain()
    run(measured, False, 100, tokens=8, ms=20.0)
    run(measured, True, 100, tokens=16, ms=30.0)
    for _ in range(3):
        run(measured, False, 4, tokens=8, ms=60.0)
        run(measured, True, 32, tokens=16, ms=90.0)
    assert not measured.is_slower(SESSIONS)


def share_asked(gain: float, seed: int, promised: float = 0.9, steps: int = 3000) -> float:
    """The share of steps that ask a proposer whose steps yield `gain` more.

    The proposer promises `promised` accepted tokens a step, and its drafts take half a bare step. The tokens
    of a step scatter as an acceptance length does.
    """
    price, chance, asked = ProposerPrice(), random.Random(seed), 0
    accepted = 1.5 * (1 + gain) - 1
    for _ in range(steps):
        tokens, begins = 1, price.begins(1, 1.0)
        if begins:
            asked += 1
            price.computed(0, 0.5, promised, 1)
            while tokens < 8 and chance.random() < accepted / (1 + accepted):
                tokens += 1
        price.measured.learn(1, begins, tokens, (1.5 if begins else 1.0) * chance.lognormvariate(0, 0.06))
    return asked / steps


@pytest.mark.parametrize("seed", range(4))
def test_a_moderate_gain_is_not_lost_in_the_scatter_of_tokens(seed: int) -> None:
    assert share_asked(0.2, seed) > 0.8


@pytest.mark.parametrize("seed", range(4))
def test_a_moderate_loss_is_found_in_the_scatter_of_tokens(seed: int) -> None:
    assert share_asked(-0.15, seed) < 0.1


def test_now_and_then_a_few_steps_leave_the_proposer_out() -> None:
    measured = MeasuredGain()
    asked = []
    for _ in range(84):
        asked.append(not measured.leaves_out(SESSIONS))
        measured.learn(SESSIONS, asked[-1], 16, 20.0)
    left_out = [False] * 6
    assert asked == [
        *([True] * 4 + left_out),
        *([True] * 8 + left_out),
        *([True] * 16 + left_out),
        *([True] * 32 + left_out),
    ]


def test_without_a_clock_no_step_leaves_the_proposer_out() -> None:
    measured = MeasuredGain()
    assert not any(measured.leaves_out(SESSIONS) for _ in range(100))


def test_a_proposer_that_estimates_too_much_of_itself_comes_to_rest() -> None:
    price, chance, asked = ProposerPrice(), random.Random(0), 0
    for _ in range(1000):
        begins = price.begins(SESSIONS, 0.4)
        if begins:
            price.computed(0, 5.0, 8.0, SESSIONS)  # it promises 8 tokens in 5 ms, and gains a few in 20 ms
        tokens = SESSIONS + (chance.randrange(5) if begins else 0)
        price.measured.learn(SESSIONS, begins, tokens, 40.0 if begins else 20.0)
        asked += begins
    assert asked < 100


def test_a_proposer_that_estimates_too_much_of_itself_loses_little_in_an_answer_of_fifty_tokens() -> None:
    price, asked = ProposerPrice(), 0
    for _ in range(50):
        begins = price.begins(1, 0.25)
        if begins:
            price.computed(0, 1.0, 0.9, 1)
        price.measured.learn(1, begins, 1, 5.0 if begins else 4.0)  # nothing that it drafts is right
        asked += begins
    assert asked <= 20


def test_a_proposer_that_pays_is_asked_in_nearly_every_step() -> None:
    price, chance, asked = ProposerPrice(), random.Random(0), 0
    for _ in range(1000):
        begins = price.begins(SESSIONS, 0.4)
        if begins:
            price.computed(0, 5.0, 8.0, SESSIONS)
        tokens = SESSIONS + (chance.randrange(12) if begins else 0)
        price.measured.learn(SESSIONS, begins, tokens, 25.0 if begins else 20.0)
        asked += begins
    assert asked > 930


def test_a_trial_waits_while_another_proposer_is_tried() -> None:
    price = ProposerPrice()
    assert price.is_tried
    assert not any(price.begins(SESSIONS, 0.4, may_try=False) for _ in range(10))
    assert price.is_tried
    assert price.begins(SESSIONS, 0.4)


@pytest.mark.parametrize("seed", range(4))
def test_a_proposer_that_estimates_too_little_of_itself_is_asked_once_its_gain_is_measured(seed: int) -> None:
    assert share_asked(0.4, seed, promised=0.4) > 0.5
