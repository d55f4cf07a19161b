"""The epoch that a request is opened under, where its session is known from elsewhere."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.admitted_request import AdmittedRequest, Speculation
from orchestrator.fleet.target_model import TargetModel
from orchestrator.relay.epochs import Epochs
from orchestrator.relay.opener import Opener, OpenPlan, Placement
from orchestrator.relay.request_state import RequestState
from orchestrator.store import SessionRecord
from orchestrator.store.ledger import Ledger
from orchestrator.store.memory import MemoryStore
from outrider.v1 import verifier_pb2
from outrider.wire.codec import SessionKey
from outrider.wire.epochs import DAY_MS, RANDOM_BITS
from speculative.errors import DeadlineExceeded, StaleEpoch, Unavailable
from speculative.params import SamplingParams

KEY = SessionKey("default", "mine")
NOW_MS = 1_750_000_000_000
AN_HOUR_AHEAD = (NOW_MS + 3_600_000) << RANDOM_BITS
TARGET = TargetModel("toy", 64, 64, "", None, ())
REQUEST = AdmittedRequest(KEY, (5,), 9, SamplingParams(), 1, (), Speculation(True, (), None))


class Link:
    """Stands for a verifier: answers each Open with the next answer that a test has set."""

    target = TARGET

    def __init__(self, address: str, *answers: Exception | None) -> None:
        self.address = address
        self.target = TARGET
        self.epochs: list[int] = []
        self._answers = list(answers)

    @contextmanager
    def opening(self, count: int) -> Iterator[None]:
        yield

    async def open(self, message: verifier_pb2.OpenRequest, timeout_s: float) -> verifier_pb2.OpenResponse:
        self.epochs.append(message.epoch)
        if (error := self._answers.pop(0) if self._answers else None) is not None:
            raise error
        return verifier_pb2.OpenResponse()

    def cancel_soon(self, key: SessionKey, epoch: int) -> None:
        """Nobody waits for it."""


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def ledger(store: MemoryStore) -> Ledger:
    return Ledger(store, lambda seconds: None)


@pytest.fixture
def opener(ledger: Ledger) -> Opener:
    epochs = Epochs(lambda: NOW_MS, random.Random(7).getrandbits)
    return Opener(ledger, epochs, RequestState(), REQUEST, TARGET)


async def opened(opener: Opener, link: Link, plan: OpenPlan | None = None) -> Placement:
    there: Any = link
    return await opener.open(there, (), plan or OpenPlan({0: []}), None)


async def test_a_new_request_goes_above_the_epoch_that_its_session_has_on_record(
    store: MemoryStore, ledger: Ledger, opener: Opener
) -> None:
    """It was given by a clock that is ahead; the verifier that is asked now has never heard of it."""
    await store.put([(SessionRecord(KEY, AN_HOUR_AHEAD, "a:1"), AN_HOUR_AHEAD)])
    await store.cancel(KEY)
    known = await ledger.whereabouts(REQUEST, "toy")
    assert (known.epoch, known.cancelled) == (AN_HOUR_AHEAD, False)
    opener.heard_of(known.epoch)
    place = await opened(opener, Link("b:1"))
    assert place.epoch > AN_HOUR_AHEAD
    assert await store.put([(SessionRecord(KEY, place.epoch, "b:1"), place.epoch)]) == [True]
    record = await store.find(KEY)
    assert record is not None
    assert not record.cancelled, "a Cancel of the request before this one is lifted"


@pytest.mark.parametrize(("prompt", "cancelled"), [((5,), True), ((5, 6), False)])
async def test_a_recorded_cancel_is_of_its_own_request(
    store: MemoryStore, ledger: Ledger, prompt: tuple[int, ...], cancelled: bool
) -> None:
    """The store had no answer when the next one was placed, lower; it is asked when that is gone on with."""
    await store.put([(SessionRecord(KEY, AN_HOUR_AHEAD, "a:1", request=REQUEST.mark), AN_HOUR_AHEAD)])
    await store.cancel(KEY)
    lower = AN_HOUR_AHEAD - 1
    gone_on_with = replace(REQUEST, ids=prompt, have=((7,),), seen_epoch=lower)
    assert (await ledger.whereabouts(gone_on_with, "toy")).cancelled is cancelled
    assert await ledger.is_cancelled(KEY, lower, gone_on_with.mark) is cancelled


def test_a_request_is_told_from_others_by_seed_and_prompt() -> None:
    same = [REQUEST, replace(REQUEST, have=((7,),), seen_epoch=9)]
    others = [replace(REQUEST, seed=2), replace(REQUEST, ids=(6,)), replace(REQUEST, ids=(5, 5))]
    others += [
        replace(REQUEST, seed=2**64 - 1),
        replace(REQUEST, ids=(5,) * 300),
        replace(REQUEST, ids=(5,) * 301),
    ]
    assert len({one.mark for one in same}) == 1
    assert len({one.mark for one in (REQUEST, *others)}) == 1 + len(others)


async def test_a_record_that_nobody_could_go_above_is_passed_over(opener: Opener) -> None:
    opener.heard_of((NOW_MS + 2 * DAY_MS) << RANDOM_BITS)
    assert (await opened(opener, Link("a:1"))).epoch >> RANDOM_BITS == NOW_MS


async def test_a_request_counts_from_the_first_epoch_that_a_verifier_may_have_taken(opener: Opener) -> None:
    link = Link("a:1", StaleEpoch("older", AN_HOUR_AHEAD), Unavailable("connection reset"))
    with pytest.raises(Unavailable):
        await opened(opener, link)
    assert opener.first == link.epochs[1]
    place = await opened(opener, Link("b:1"))
    assert opener.first == link.epochs[1] < place.epoch


async def test_a_request_whose_time_is_over_is_never_opened(opener: Opener) -> None:
    """Its lookups may have taken what was left; its session may still run an earlier request."""
    late: Any = Link("a:1")
    with pytest.raises(DeadlineExceeded, match="time limit is over"):
        await opener.open(late, (), OpenPlan({0: []}), 0.0)
    assert (late.epochs, opener.first) == ([], 0)


async def test_what_one_verifier_said_of_a_session_counts_at_the_next(opener: Opener) -> None:
    first = Link("a:1", StaleEpoch("older", AN_HOUR_AHEAD), Unavailable("connection reset"))
    with pytest.raises(Unavailable):
        await opened(opener, first)
    place = await opened(opener, Link("b:1"))
    assert place.epoch > first.epochs[-1] > AN_HOUR_AHEAD > first.epochs[0]
