"""What happens between two launches of the target, and what while it computes."""

import time
from collections.abc import Sequence
from itertools import chain, repeat
from statistics import median

from core_driver import GREEDY
from ngram_lm import NgramLM, NgramOutcome

from outrider.lm.plan import SequenceRows
from outrider.lm.step_profile import StepProfile
from outrider.wire.codec import SessionKey
from speculative.fragment import Fragment
from speculative.hashing import prefix_hash
from speculative.stop import StopChecker
from verifier_service.engine.messages import InFlight, Offers, Open, StepReport
from verifier_service.engine.session import Session
from verifier_service.engine.step import EngineLimits
from verifier_service.engine.step_cost import StepCostModel
from verifier_service.engine.thread import EngineThread
from verifier_service.sessions.request import SessionRequest, SourceSet

FORWARD_S = 0.005
PROMPT = (1, 2, 3)
STEPS = 10


class Device(NgramLM):
    """A target that takes 5 ms and notes when it was launched and when it was done."""

    def __init__(self, events: list[tuple[str, float]]) -> None:
        super().__init__()
        self._events = events
        self.amid = lambda: None

    def forward(self, sequences: Sequence[SequenceRows]) -> NgramOutcome:
        self._events.append(("launch", time.perf_counter()))
        self.amid()
        ends = self._events[-1][1] + FORWARD_S
        found = super().forward(sequences)
        while time.perf_counter() < ends:
            time.sleep(0)
        self._events.append(("done", time.perf_counter()))
        return found


class Engine:
    """An engine's turns, taken one by one by the test, and the order of what happens in them."""

    def __init__(self, sessions: int, profiles: Sequence[StepProfile | None] = ()) -> None:
        self.events: list[tuple[str, float]] = []
        self.target = Device(self.events)
        limits = EngineLimits(wait_ms_most=0.0)
        self.costs = StepCostModel({1: 1000 * FORWARD_S, 64: 1000 * FORWARD_S})
        turns = chain(profiles, repeat(None))
        self.thread = EngineThread(
            self.target,
            limits,
            self._published,
            self._failed,
            self.costs,
            take_profile=lambda: next(turns),
        )
        inside = SourceSet(("drafter",), frozenset(), frozenset((1,)))
        for handle in range(1, sessions + 1):
            key, limit = SessionKey("", f"s{handle}"), len(PROMPT) + 100
            request = SessionRequest(key, 1, PROMPT, len(PROMPT), limit, GREEDY, 0, (), None, 8, ())
            stop = StopChecker(frozenset(), limit, (), None, PROMPT, len(PROMPT))
            self.thread.put(Open(Session(handle, request, stop, self.target.vocabulary_size, inside)))

    def turn(self, count: int) -> None:
        """Takes some turns."""
        for _ in range(count):
            self.thread._turn()

    def _published(self, report: StepReport) -> None:
        tokens = any(update.ids for update in report.updates)
        self.events.append(("tokens" if tokens else "report", time.perf_counter()))

    def _failed(self, error: BaseException) -> None:
        raise error


def test_tokens_leave_before_the_next_launch_and_nothing_else_waits_for_them() -> None:
    engine = Engine(sessions=3)
    engine.turn(STEPS)

    assert [name for name, _ in engine.events[:3]] == ["report", "launch", "done"]
    assert [name for name, _ in engine.events[3:]] == ["tokens", "launch", "done"] * (STEPS - 1)
    done = [when for name, when in engine.events if name == "done"]
    launched = [when for name, when in engine.events if name == "launch"]
    idle_ms = [(after - before) * 1e3 for before, after in zip(done[1:], launched[2:], strict=False)]
    print(f"the device idles {median(idle_ms):.3f} ms between two passes of three sessions")


def test_drafts_that_come_while_the_target_computes_are_merged_then() -> None:
    engine = Engine(sessions=2)
    merged: list[int] = []

    def offer() -> None:
        draft = Fragment(1, 1, len(PROMPT), prefix_hash(PROMPT), (5, 6), (-1, 0), (0.9, 0.8))
        in_flight = InFlight()
        in_flight.put += 2
        engine.thread.put(Offers(((1, draft), (2, draft)), time.perf_counter(), in_flight))
        merged.append(len(list(engine.thread._inbox.waiting())))

    engine.target.amid = offer
    engine.turn(1)

    assert merged == [0], "the bringer merged all of them while the target computed"


def test_passes_of_another_kind_are_weighed_by_their_own_profile_from_the_first_pass_on() -> None:
    steep = StepProfile({1: 1000 * FORWARD_S, 2: 2000 * FORWARD_S, 64: 64000 * FORWARD_S})
    engine = Engine(sessions=1, profiles=[None, None, steep])
    engine.turn(2)
    assert engine.costs.expected_ms(32) < 2 * engine.costs.expected_ms(1)
    engine.turn(1)
    assert engine.costs.expected_ms(32) > 25 * engine.costs.expected_ms(1)
