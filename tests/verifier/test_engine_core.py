"""The engine's core without a thread, a queue or a clock: both halves of a step are called by hand."""

import time

import pytest
from ngram_lm import NgramLM

from outrider.wire.codec import SessionKey
from speculative.fragment import Fragment
from speculative.hashing import prefix_hash
from speculative.params import SamplingParams
from speculative.stop import FinishReason, StopChecker
from verifier_service.engine.core import AwaitDrafts, EngineCore, Idle, TargetPass
from verifier_service.engine.kv_cache import KVCache
from verifier_service.engine.messages import Cancel, InFlight, Offers, Open, Park, Sources, WaitFor
from verifier_service.engine.session import Session
from verifier_service.engine.stats import PassTimes
from verifier_service.engine.step import EngineLimits
from verifier_service.engine.step_cost import StepCostModel
from verifier_service.sessions.request import SessionRequest, SourceSet

PROMPT = (1, 2, 3)
NEW = 12
REMOTE = SourceSet(("far",), frozenset(), frozenset({1}))
PLAIN = SourceSet((), frozenset(), frozenset())
GREEDY = SamplingParams(temperature=0.0)
STEP_S = 0.02


@pytest.fixture(autouse=True)
def no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here may ask what time it is."""

    def asked() -> float:
        raise AssertionError("the core has no clock")

    monkeypatch.setattr(time, "perf_counter", asked)
    monkeypatch.setattr(time, "monotonic", asked)


class Driver:
    """Computes the passes of a core, on a clock of its own."""

    def __init__(self, wait_ms: float = 0.0, slots: int = 1 << 16, new: int = NEW) -> None:
        self.new = new
        self.target = NgramLM(slots=slots)
        self.now = 100.0
        limits = EngineLimits(wait_ms_most=wait_ms, adaptive=False)
        costs = StepCostModel({1: 1000 * STEP_S, 64: 1100 * STEP_S})
        self.core = EngineCore(KVCache(self.target.pool, True, 0.0), limits, costs)

    def open(self, handle: int, sources: SourceSet = PLAIN, deadline_s: float | None = None) -> Session:
        limit = len(PROMPT) + self.new
        key = SessionKey("", f"s{handle}")
        request = SessionRequest(key, 1, PROMPT, len(PROMPT), limit, GREEDY, 0, (), None, 8, ())
        stop_checker = StopChecker(frozenset(), limit, (), None, PROMPT, len(PROMPT))
        session = Session(handle, request, stop_checker, self.target.vocabulary_size, sources, deadline_s)
        self.apply(Open(session))
        return session

    def apply(self, command: Open | Cancel | Park | Sources | Offers | WaitFor) -> None:
        self.core.apply(command, self.now)

    def draft(self, session: Session, count: int) -> None:
        """What the target would say next, as its source."""
        ids = self.golden(len(session.ids) - len(PROMPT) + count)
        base = len(session.ids)
        chain = tuple(range(-1, count - 1))
        fragment = Fragment(1, 1, base, prefix_hash(session.ids), ids[base:], chain, (1.0,) * count)
        self.apply(Offers(((session.handle, fragment),), self.now, InFlight(put=1)))

    def golden(self, count: int) -> tuple[int, ...]:
        """The prompt and so many ids that follow it."""
        ids = list(PROMPT)
        for _ in range(count):
            ids.append(int(self.target.logits(ids).argmax()))
        return tuple(ids)

    def begin(self) -> TargetPass:
        """The next pass, after the wait for drafts if there is one; whatever is to be published is."""
        begun = self.core.begin(self.now)
        self.publish(begun)
        while isinstance(begun, AwaitDrafts):
            self.now = max(self.now, begun.until_s)
            begun = self.core.begin(self.now)
        assert isinstance(begun, TargetPass)
        return begun

    def publish(self, begun: TargetPass | AwaitDrafts | Idle) -> None:
        if begun.report is not None:
            self.core.published(begun.report, self.now)

    def finish(self, begun: TargetPass) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Ids by session handle that the pass committed."""
        outcome = self.target.forward(begun.sequences)
        began, self.now = self.now, self.now + STEP_S
        updates = self.core.finish(begun, outcome, PassTimes(began, self.now))
        return tuple((update.handle, update.ids) for update in updates)

    def idle(self) -> Idle:
        begun = self.core.begin(self.now)
        assert isinstance(begun, Idle)
        return begun


def test_both_halves_decode_what_the_target_says() -> None:
    driver = Driver()
    session = driver.open(1)
    ids: list[int] = []
    for _ in range(NEW):
        ((handle, new),) = driver.finish(driver.begin())
        assert handle == 1
        ids += new
    assert (*PROMPT, *ids) == driver.golden(NEW) == tuple(session.ids)
    idle = driver.idle()
    (update,) = idle.report.updates
    assert update.finish is not None
    assert update.finish.reason is FinishReason.LENGTH
    assert idle.until_s == driver.now + EngineLimits().beat_s
    assert driver.core.totals.steps == driver.core.totals.rounds == NEW
    driver.core.kv.check()


def test_what_a_pass_committed_goes_out_with_the_batch_of_the_next() -> None:
    driver = Driver()
    driver.open(1)
    first = driver.begin()
    assert first.report is not None
    assert (first.report.step, first.report.updates) == (1, ())
    assert first.report.expected_us == pytest.approx(1e6 * STEP_S, rel=0.1)
    ((_, ids),) = driver.finish(first)
    second = driver.begin()
    assert second.report is not None
    assert [update.ids for update in second.report.updates] == [ids]


def test_a_draft_that_comes_while_the_target_computes_is_merged_at_once() -> None:
    driver = Driver()
    session = driver.open(1, REMOTE)
    driver.finish(driver.begin())
    begun = driver.begin()
    driver.draft(session, 4)
    assert driver.core.counts["far"].kept == 4
    assert len(driver.finish(begun)[0][1]) == 1, "it was too late for this pass"
    assert len(driver.finish(driver.begin())[0][1]) == 4, "one of its nodes had been committed meanwhile"
    assert tuple(session.ids) == driver.golden(6)


def test_a_draft_that_cannot_be_merged_now_is_taken_when_the_pass_is_finished() -> None:
    """Its session is not known yet: the Open comes behind it."""
    driver = Driver()
    driver.open(1)
    begun = driver.begin()
    in_flight = InFlight(put=1)
    stray = Fragment(1, 1, 3, prefix_hash(PROMPT), (7,), (-1,), (1.0,))
    driver.apply(Offers(((2, stray),), driver.now, in_flight))
    assert in_flight.count == 1
    driver.open(2, REMOTE)
    driver.finish(begun)
    assert in_flight.count == 0
    assert driver.core.counts["far"].kept == 1


@pytest.mark.parametrize("command", [Cancel(1), Park(1)])
def test_a_session_keeps_its_blocks_while_the_target_computes(command: Cancel | Park) -> None:
    driver = Driver()
    one, other = driver.open(1), driver.open(2)
    driver.finish(driver.begin())
    begun = driver.begin()
    driver.apply(command)
    assert one in driver.core.sessions
    assert one in driver.core.kv
    assert {handle for handle, _ in driver.finish(begun)} == {1, 2}, "its pass was computed and counts"
    assert one not in driver.core.sessions
    assert one not in driver.core.kv
    last = driver.begin()
    assert last.report is not None
    assert [update.handle for update in last.report.updates] == [1, 2, 1]
    assert [session for session, _ in last.parts] == [other]
    driver.finish(last)
    driver.core.kv.check()


def test_a_session_that_is_opened_while_the_target_computes_is_in_the_next_pass() -> None:
    driver = Driver()
    driver.open(1)
    driver.finish(driver.begin())
    begun = driver.begin()
    driver.open(2)
    driver.apply(Sources(1, REMOTE))
    assert len(driver.finish(begun)) == 1
    assert len(driver.begin().parts) == 2


def test_a_pass_that_failed_ends_its_sessions_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    driver = Driver()
    driver.open(1)
    begun = driver.begin()
    driver.open(2)
    driver.core.abandon(begun, MemoryError("no room for 4 GiB"))
    after = driver.begin()
    assert [session.handle for session, _ in after.parts] == [2]
    assert after.report is not None
    (update,) = after.report.updates
    assert update.finish is not None
    assert update.finish.message == "the target's forward failed: MemoryError: no room for 4 GiB"
    assert "session" in caplog.text
    assert driver.core.totals.steps == 0


def test_a_deadline_is_on_the_caller_s_clock() -> None:
    driver = Driver()
    driver.open(1, deadline_s=driver.now + 2.5 * STEP_S)
    for _ in range(3):
        driver.finish(driver.begin())
    finish = driver.idle().report.updates[-1].finish
    assert finish is not None
    assert finish.reason is FinishReason.CANCELLED


def test_one_pass_is_computed_at_a_time() -> None:
    driver = Driver()
    driver.open(1)
    first = driver.begin()
    with pytest.raises(AssertionError, match="one pass"):
        driver.core.begin(driver.now)
    driver.finish(first)
    second = driver.begin()
    with pytest.raises(AssertionError, match="another pass"):
        driver.core.abandon(first, ValueError())
    driver.finish(second)


def with_a_known_source(driver: Driver) -> Session:
    """A session whose source has brought each round's drafts 2 ms after it, and before the next."""
    session = driver.open(1, REMOTE)
    begun = driver.begin()
    driver.now += 0.002
    driver.draft(session, 1)
    driver.finish(begun)
    for _ in range(3):
        begun = driver.core.begin(driver.now)
        assert isinstance(begun, AwaitDrafts)
        driver.publish(begun)
        begun = driver.core.begin(driver.now)
        driver.now += 0.002
        driver.draft(session, 1)
        if isinstance(begun, AwaitDrafts):
            begun = driver.core.begin(driver.now)
        assert isinstance(begun, TargetPass)
        driver.finish(begun)
    return session


def test_a_lone_session_may_wait_for_a_draft_and_goes_on_with_it() -> None:
    driver = Driver(wait_ms=4.0)
    session = with_a_known_source(driver)
    first = driver.core.begin(driver.now)
    assert isinstance(first, AwaitDrafts)
    assert first.until_s == driver.now, "first its batch is to be published"
    driver.publish(first)
    waiting = driver.core.begin(driver.now)
    assert isinstance(waiting, AwaitDrafts)
    assert waiting.report is None
    assert waiting.until_s == pytest.approx(driver.now + 0.002, abs=0.001)
    driver.now += 0.001
    driver.draft(session, 8)
    begun = driver.core.begin(driver.now)
    assert isinstance(begun, TargetPass)
    assert begun.report is None, "it is out already"
    waits = driver.core.totals.waits
    assert len(driver.finish(begun)[0][1]) > 1
    assert waits >= 1
    assert tuple(session.ids) == driver.golden(len(session.ids) - len(PROMPT))


def test_a_lone_session_of_silent_sources_is_published_as_its_pass_begins() -> None:
    driver = Driver(wait_ms=4.0)
    session = driver.open(1, REMOTE)
    for _ in range(3):
        begun = driver.core.begin(driver.now)
        assert isinstance(begun, TargetPass), "nothing is worth a wait"
        assert begun.report is not None
        driver.publish(begun)
        driver.finish(begun)
    driver.draft(session, 1)
    assert isinstance(driver.core.begin(driver.now), AwaitDrafts), "the source may draft more"


def test_a_wait_ends_when_another_session_comes() -> None:
    driver = Driver(wait_ms=4.0)
    with_a_known_source(driver)
    driver.publish(driver.core.begin(driver.now))
    assert isinstance(driver.core.begin(driver.now), AwaitDrafts)
    driver.open(2)
    begun = driver.core.begin(driver.now)
    assert isinstance(begun, TargetPass)
    assert [session.handle for session, _ in begun.parts] == [1]
    driver.finish(begun)
    assert len(driver.begin().parts) == 2, "with two ready sessions nothing is waited for"


def test_a_wait_ends_when_its_session_goes() -> None:
    driver = Driver(wait_ms=4.0)
    with_a_known_source(driver)
    driver.publish(driver.core.begin(driver.now))
    assert isinstance(driver.core.begin(driver.now), AwaitDrafts)
    driver.apply(Cancel(1))
    assert driver.idle().report.updates[-1].finish is not None
    assert driver.idle().report.updates == ()


def test_where_memory_is_short_the_youngest_gives_way_and_still_says_the_same() -> None:
    driver = Driver(slots=48)
    sessions = [driver.open(handle, PLAIN) for handle in (1, 2, 3)]
    for _ in range(4 * NEW):
        if not len(driver.core.sessions):
            break
        driver.finish(driver.begin())
    assert [tuple(session.ids) for session in sessions] == [driver.golden(NEW)] * 3
    driver.core.kv.check()


def with_a_patient_session(driver: Driver) -> Session:
    """A session past its first round, whose source asks that rounds wait for 50 ms."""
    session = driver.open(1, REMOTE)
    driver.finish(driver.begin())
    driver.apply(WaitFor(1, 1, 50))
    return session


def test_a_round_waits_for_a_source_that_asks_for_it_and_begins_with_its_draft() -> None:
    driver = Driver()
    session = with_a_patient_session(driver)
    idle = driver.idle()
    assert idle.until_s == pytest.approx(driver.now + 0.05)
    assert [update.handle for update in idle.report.updates] == [1], "the source has to know what to continue"
    driver.now += 0.01
    driver.draft(session, 4)
    ((_, ids),) = driver.finish(driver.begin())
    assert len(ids) == 5
    assert tuple(session.ids) == driver.golden(len(session.ids) - len(PROMPT))


def test_no_draft_is_waited_for_where_only_the_targets_last_token_is_missing() -> None:
    driver = Driver()
    session = with_a_patient_session(driver)
    while (missing := NEW - (len(session.ids) - len(PROMPT))) > 1:
        if missing > 2:
            driver.draft(session, min(4, missing - 2))
        driver.now += 0.05
        driver.finish(driver.begin())
    assert [len(ids) for _, ids in driver.finish(driver.begin())] == [1], "at once"
    assert tuple(session.ids) == driver.golden(NEW)


def test_other_sessions_go_on_while_a_round_waits() -> None:
    driver = Driver()
    with_a_patient_session(driver)
    driver.open(2)
    for _ in range(2):
        assert [handle for handle, _ in driver.finish(driver.begin())] == [2]
    driver.now += 0.05
    assert [handle for handle, _ in driver.finish(driver.begin())] == [1, 2]


def test_a_session_whose_round_waits_gives_way_where_memory_is_short() -> None:
    driver = Driver(slots=64, new=50)
    patient = with_a_patient_session(driver)
    driver.apply(WaitFor(1, 1, 10_000))
    other = driver.open(2)
    for _ in range(50):
        assert [handle for handle, _ in driver.finish(driver.begin())] == [2]
    driver.apply(WaitFor(1, 1, 0))
    while len(driver.core.sessions):
        driver.finish(driver.begin())
    assert tuple(patient.ids) == tuple(other.ids) == driver.golden(50)
    driver.core.kv.check()


def test_a_source_that_stays_silent_is_waited_for_three_times_and_again_once_it_was_right() -> None:
    driver = Driver()
    session = with_a_patient_session(driver)
    for _ in range(3):
        driver.now = driver.idle().until_s
        driver.finish(driver.begin())
    driver.finish(driver.begin())
    driver.draft(session, 1)
    driver.finish(driver.begin())
    assert driver.idle().until_s == pytest.approx(driver.now + 0.05)


def test_a_source_that_is_always_wrong_is_not_waited_for_without_end() -> None:
    driver = Driver(new=40)
    session = with_a_patient_session(driver)
    waits = 0
    for _ in range(20):
        begun = driver.core.begin(driver.now)
        driver.publish(begun)
        if isinstance(begun, Idle):
            waits += 1
            right = driver.golden(len(session.ids) - len(PROMPT) + 1)[-1]
            wrong = (right + 1) % driver.target.vocabulary_size
            base = len(session.ids)
            fragment = Fragment(1, 1, base, prefix_hash(session.ids), (wrong,), (-1,), (1.0,))
            driver.apply(Offers(((1, fragment),), driver.now, InFlight(put=1)))
            begun = driver.begin()
        assert isinstance(begun, TargetPass)
        driver.finish(begun)
    assert waits == 8


def test_no_round_waits_for_a_source_that_its_session_uses_no_longer() -> None:
    driver = Driver()
    with_a_patient_session(driver)
    driver.apply(Sources(1, SourceSet(REMOTE.names, frozenset(), frozenset())))
    driver.finish(driver.begin())
    driver.apply(WaitFor(1, 1, 50))
    driver.finish(driver.begin())
    driver.apply(Sources(1, REMOTE))
    driver.finish(driver.begin())
    driver.apply(WaitFor(1, 1, 50))
    assert driver.idle().until_s == pytest.approx(driver.now + 0.05)


def test_a_source_may_take_back_what_it_asked_for() -> None:
    driver = Driver()
    with_a_patient_session(driver)
    driver.apply(WaitFor(1, 1, 0))
    driver.apply(WaitFor(9, 1, 50))
    driver.finish(driver.begin())
