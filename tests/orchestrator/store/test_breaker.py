"""When a store is left alone, and when it is tried again, on a clock of the test's own."""

from orchestrator.store.breaker import FAILURES, PAUSE_S, Breaker


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def opened(clock: Clock) -> Breaker:
    breaker = Breaker(clock)
    assert [breaker.failed() for _ in range(FAILURES)] == [False] * (FAILURES - 1) + [True]
    return breaker


def test_a_few_failures_in_a_row_open_it() -> None:
    breaker = opened(Clock())
    assert not breaker.closed
    assert not breaker.allows()
    assert breaker.opened == 1


def test_failures_with_an_answer_between_them_do_not() -> None:
    breaker = Breaker(Clock())
    for _ in range(10 * FAILURES):
        assert not breaker.failed()
        assert breaker.allows()
        assert not breaker.succeeded()
    assert breaker.closed


def test_after_its_pause_one_call_may_try() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.now += 0.99 * PAUSE_S[0]
    assert not breaker.allows()
    clock.now += 0.02 * PAUSE_S[0]
    assert [breaker.allows() for _ in range(3)] == [True, False, False]


def test_an_answer_to_the_trial_closes_it() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.now += PAUSE_S[0]
    assert breaker.allows()
    assert breaker.succeeded()
    assert all(breaker.allows() for _ in range(5))
    assert not breaker.failed(), "it takes as many failures as before"


def test_each_failed_trial_doubles_the_pause_up_to_the_longest() -> None:
    clock = Clock()
    breaker = opened(clock)
    pause_s = PAUSE_S[0]
    for _ in range(8):
        clock.now += pause_s
        assert breaker.allows()
        assert not breaker.failed(), "it was open already"
        pause_s = min(2 * pause_s, PAUSE_S[1])
        clock.now += 0.99 * pause_s
        assert not breaker.allows()
        clock.now -= 0.99 * pause_s
    assert pause_s == PAUSE_S[1]
    assert breaker.opened == 1


def test_calls_from_before_it_opened_lengthen_no_pause() -> None:
    clock = Clock()
    breaker = opened(clock)
    assert not any(breaker.failed() for _ in range(20))
    clock.now += PAUSE_S[0]
    assert breaker.allows()


def test_a_trial_that_never_ends_is_followed_by_another() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.now += PAUSE_S[0]
    assert breaker.allows()
    clock.now += PAUSE_S[0]
    assert breaker.allows()
