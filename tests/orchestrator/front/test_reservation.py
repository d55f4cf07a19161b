"""Places for a call's requests, taken before its message is parsed."""

import re

import pytest

from orchestrator.front.auth import ApiKey, Caller
from orchestrator.front.concurrency import ConcurrencyLimit
from orchestrator.front.quota import Allowance, Quota
from orchestrator.front.reservation import reserved
from speculative.errors import InvalidRequest, OutriderError, Overloaded, QuotaExceeded


class NoRelay:
    """Stands where a limit keeps its relay, which only `stop` asks."""


def limit(most: int) -> ConcurrencyLimit:
    return ConcurrencyLimit(NoRelay(), most)  # type: ignore[arg-type]


def caller(quota: Quota, refused: list[OutriderError] | None = None) -> Caller:
    told = [] if refused is None else refused
    return Caller(ApiKey("k", "acme", quota), Allowance(quota, 0.0), lambda: 0.0, told.append)


def test_a_reservation_holds_one_place_until_it_is_widened() -> None:
    places, whose = limit(3), caller(Quota(streams=3))
    with reserved(places, whose) as first:
        full = pytest.raises(Overloaded, match="3 requests run here, 3 there may be")
        with reserved(places, whose), reserved(places, whose), full:
            first.widen(2)
        first.widen(3)
        with pytest.raises(Overloaded), reserved(places, whose):
            pass
    with reserved(places, whose) as again:
        again.widen(3)


def test_widening_to_as_many_places_as_are_held_or_fewer_changes_nothing() -> None:
    places, whose = limit(2), caller(Quota(requests_per_minute=2))
    with reserved(places, whose) as held:
        held.widen(2)
        held.widen(2)
        held.widen(1)


def test_each_request_of_a_call_is_charged_once() -> None:
    whose = caller(Quota(requests_per_minute=4))
    with reserved(limit(8), whose) as held:
        held.widen(3)
    with reserved(limit(8), whose):
        pass
    with pytest.raises(QuotaExceeded), reserved(limit(8), whose):
        pass


@pytest.mark.parametrize(
    ("most", "quota", "why"),
    [
        (2, Quota(), "prompt has 3 prompts; at most 2 are answered at once"),
        (8, Quota(streams=2), "prompt has 3 prompts; this key has streams 2"),
        (8, Quota(requests_per_minute=2), "prompt has 3 prompts; this key has requests_per_minute 2"),
    ],
)
def test_more_places_than_there_can_ever_be_are_the_requests_own_fault(
    most: int, quota: Quota, why: str
) -> None:
    with reserved(limit(most), caller(quota)) as held, pytest.raises(InvalidRequest, match=re.escape(why)):
        held.widen(3)


def test_a_refused_reservation_leaves_no_place_taken_and_tells_who_counts_refusals() -> None:
    places, told = limit(1), list[OutriderError]()
    whose = caller(Quota(streams=1), told)
    with reserved(limit(1), whose), pytest.raises(QuotaExceeded), reserved(places, whose):
        pass
    with reserved(places, whose):
        pass
    assert [type(error) for error in told] == [QuotaExceeded]
