"""What a key may use, on a given clock."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.front.quota import Allowance, Bucket, Quota
from speculative.errors import InvalidRequest, QuotaExceeded


def test_a_bucket_is_full_at_first_and_fills_at_an_even_pace() -> None:
    bucket = Bucket(60, 0.0)
    assert bucket.wait_s(60, 0.0) == 0
    bucket.take(60, 0.0)
    assert bucket.wait_s(1, 0.0) == pytest.approx(1.0)
    assert bucket.wait_s(10, 5.0) == pytest.approx(5.0)
    assert bucket.wait_s(60, 600.0) == 0


def test_an_overdrawn_bucket_is_made_up_first() -> None:
    bucket = Bucket(60, 0.0)
    bucket.take(180, 0.0)
    assert bucket.wait_s(1, 0.0) == pytest.approx(121.0)
    assert bucket.wait_s(1, 121.0) == pytest.approx(0.0)


def test_more_than_a_bucket_holds_waits_until_it_is_full() -> None:
    bucket = Bucket(60, 0.0)
    bucket.take(30, 0.0)
    assert bucket.wait_s(1000, 0.0) == pytest.approx(30.0)


def test_a_clock_that_steps_back_gives_nothing_and_takes_nothing() -> None:
    bucket = Bucket(60, 100.0)
    bucket.take(60, 100.0)
    assert bucket.wait_s(1, 50.0) == pytest.approx(1.0)
    assert bucket.wait_s(1, 100.5) == pytest.approx(0.5)


@given(
    per_minute=st.integers(1, 10_000),
    steps=st.lists(st.tuples(st.floats(0, 30), st.integers(1, 500)), max_size=60),
)
def test_nobody_takes_more_than_a_full_bucket_and_the_rate(
    per_minute: int, steps: list[tuple[float, int]]
) -> None:
    bucket, now, taken = Bucket(per_minute, 0.0), 0.0, 0
    for passed, amount in steps:
        now += passed
        if amount <= per_minute and bucket.wait_s(amount, now) == 0:
            bucket.take(amount, now)
            taken += amount
    assert taken <= per_minute * (1 + now / 60) + 1e-6


def test_streams_are_counted_until_they_end() -> None:
    allowance = Allowance(Quota(streams=2), 0.0)
    allowance.begin(1, 0.0)
    allowance.begin(1, 0.0)
    with pytest.raises(QuotaExceeded, match="2 requests of this key run, 2 may") as refused:
        allowance.begin(1, 0.0)
    assert refused.value.retry_after_s > 0
    allowance.end(1)
    allowance.begin(1, 0.0)


def test_requests_of_a_minute_come_back_with_time() -> None:
    allowance = Allowance(Quota(requests_per_minute=2), 0.0)
    for _ in range(2):
        allowance.begin(1, 0.0)
        allowance.end(1)
    with pytest.raises(QuotaExceeded, match="requests of the minute") as refused:
        allowance.begin(1, 0.0)
    assert refused.value.retry_after_s == pytest.approx(30.0)
    allowance.begin(1, 30.0)


def test_a_request_that_is_refused_is_not_paid_for() -> None:
    allowance = Allowance(Quota(streams=1, requests_per_minute=2), 0.0)
    allowance.begin(1, 0.0)
    for _ in range(10):
        with pytest.raises(QuotaExceeded, match="run"):
            allowance.begin(1, 0.0)
    allowance.end(1)
    allowance.begin(1, 0.0)


def test_tokens_may_be_overdrawn_by_one_answer_and_hold_up_the_next() -> None:
    allowance = Allowance(Quota(tokens_per_minute=60), 0.0)
    allowance.begin(1, 0.0)
    allowance.spend(90, 0.0)
    with pytest.raises(QuotaExceeded, match="tokens of the minute") as refused:
        allowance.begin(1, 0.0)
    assert refused.value.retry_after_s == pytest.approx(31.0)
    allowance.begin(1, 31.0)


@pytest.mark.parametrize("quota", [Quota(streams=2), Quota(requests_per_minute=2)])
def test_what_never_could_be_is_the_caller_s_fault(quota: Quota) -> None:
    with pytest.raises(InvalidRequest, match="3 prompts"):
        Allowance(quota, 0.0).begin(3, 0.0)


def test_a_quota_that_changes_keeps_what_was_used() -> None:
    allowance = Allowance(Quota(streams=1, requests_per_minute=1), 0.0)
    allowance.begin(1, 0.0)
    allowance.change(Quota(streams=2, requests_per_minute=60), 0.0)
    with pytest.raises(QuotaExceeded, match="requests"):
        allowance.begin(1, 0.0)
    allowance.begin(1, 1.0)
    allowance.change(Quota(), 1.0)
    allowance.begin(100, 1.0)
    allowance.change(Quota(streams=1), 1.0)
    with pytest.raises(QuotaExceeded):
        allowance.begin(1, 1.0)


def test_without_quotas_there_is_no_end() -> None:
    allowance = Allowance(Quota(), 0.0)
    for _ in range(1000):
        allowance.begin(1, 0.0)
        allowance.spend(10**9, 0.0)
