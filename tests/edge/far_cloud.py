"""A device and a target a round trip apart, on a virtual clock: the real session, pool and controller.

Only the model, the target and the link are toys: each takes the milliseconds that it is told to take.
"""

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from outrider.edge.controller import Controller
from outrider.edge.device_session import DeviceSession, Terms
from outrider.edge.latency_model import Conditions
from speculative.draft_pool import DraftPool
from speculative.fragment import Fragment
from speculative.params import SamplingParams
from speculative.tree import ROOT
from tests.edge.toy import VOCABULARY, ToyModel
from verifier_service.engine.source_policy import DraftWaits

PROMPT = (3, 1, 4)
MOST_NODES = 16
"""Drafted nodes that a pass verifies at most."""


def guess(ids: Sequence[int]) -> int:
    """What the toy model finds likeliest, by the last ids alone: quick."""
    return (7 * ids[-1] + 31 * ids[-2] + len(ids)) % VOCABULARY


class QuickModel(ToyModel):
    """The toy model with the quick guess."""

    def guess(self) -> int:
        return guess(self.ids)


@dataclass(slots=True)
class Answered:
    """What came of one answer."""

    ids: list[int]
    ms: float = 0.0
    """Milliseconds from the first tokens to the last ones."""
    rounds: int = 0
    timeline: list[tuple[float, str]] = field(default_factory=list)


class FarCloud:
    """Decodes one answer of `tokens` tokens.

    Args:
        at: what drafting, passes and round trips take, and how often the target agrees.
        controller: decides how the device is used; its measurements are those of this device.
        noise: share by which each pass, draft and delivery takes longer or shorter, at most.
    """

    def __init__(
        self, at: Conditions, controller: Controller, tokens: int, *, noise: float = 0.0, seed: int = 0
    ) -> None:
        self._at, self._controller, self._end = at, controller, len(PROMPT) + tokens
        self._noise, self._seed, self._chance = noise, seed, random.Random(seed)
        self._now, self._count = 0.0, 0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        terms = Terms(
            PROMPT, len(PROMPT), 0, 1, SamplingParams(temperature=0.0), VOCABULARY, self._end, 512, 16
        )
        self._device, self._model = DeviceSession(terms, controller.decision), QuickModel()
        self._drafting = False
        self._inbox: list[tuple[int, tuple[int, ...], float]] = []
        self._last_ms: float | None = None
        self._pool = DraftPool(PROMPT, epoch=1, vocabulary_size=VOCABULARY, limit=self._end)
        self._waits, self._told_ms, self._heard = DraftWaits(), controller.decision.wait_ms, set[int]()
        self._waits.ask(1, self._told_ms)  # comes with the request
        self._computing, self._round_ended_ms = False, 0.0
        self._first_ms, self._arrived = 0.0, [0.0, 0.0]
        self.answered = Answered(list(PROMPT))

    def truth(self, ids: list[int]) -> int:
        """The target's next id: the drafter's guess, as often as the acceptance says."""
        agrees = random.Random(hash((tuple(ids[-8:]), len(ids), self._seed))).random() < self._at.acceptance
        return (guess(ids) + (not agrees)) % VOCABULARY

    def run(self) -> Answered:
        """The whole answer."""
        self._commit([])  # what the prompt's pass chose
        while self._pool.length < self._end and self._due:
            self._now, _, call = heapq.heappop(self._due)
            call()
        self.answered.ids = list(self._pool.committed_from(0))
        self.answered.ms = self._now - self._first_ms
        return self.answered

    def _after(self, ms: float, call: Callable[[], None]) -> None:
        self._at_ms(self._now + ms, call)

    def _at_ms(self, due_ms: float, call: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._due, (due_ms, self._count, call))

    def _carry(self, up: bool, call: Callable[[], None]) -> None:
        """Carries a message across the link, behind the one before it."""
        due = max(self._now + self._noisy(self._at.rtt_ms / 2), self._arrived[up])
        self._arrived[up] = due
        self._at_ms(due, call)  # not after a time from now, whose rounding may swap messages

    def _noisy(self, ms: float) -> float:
        return ms * (1 + self._noise * (2 * self._chance.random() - 1))

    def _note(self, what: str) -> None:
        self.answered.timeline.append((self._now, what))

    # The target.

    def _step(self) -> None:
        """Begins a pass, unless one is computed or the round waits for a draft."""
        if self._computing or self._pool.length >= self._end:
            return
        if self._pool.is_bare and self._waits.ms and self._pool.length + 1 < self._end:
            self._waits.held()
            until = self._round_ended_ms + self._waits.ms
            if self._now < until - 1e-6:
                self._after(until - self._now, self._step)
                return
        self._computing = True
        nodes = self._pool.best_tree(MOST_NODES)
        self._note(f"pass at {self._pool.length} with {len(nodes)}")

        def ended() -> None:
            ids, sources = list(self._pool.committed_from(0)), bytearray()
            at, tokens = ROOT, []
            while True:
                token = self.truth(ids)
                tokens.append(token)
                ids.append(token)
                found = [n for n, p in enumerate(nodes.parents) if p == at and nodes.tokens[n] == token]
                if not found or len(ids) >= self._end:
                    sources.append(0)
                    break
                sources.append(1)
                at = found[0]
            self._waits.committed(bytes(sources), self._heard)
            self._heard.clear()
            self._computing = False
            self._round_ended_ms = self._now
            self._commit(tokens)

        self._after(self._noisy(self._at.verify_ms), ended)

    def _commit(self, tokens: list[int]) -> None:
        if tokens:
            position = self._pool.length
            self._pool.commit(tokens)
            self._first_ms = self._first_ms or self._now
            self.answered.rounds += 1
            self._note(f"commits {len(tokens)} at {position}")
            came = position, tuple(tokens)
            self._carry(False, lambda: self._delivered(*came))
        else:
            self._after(self._at.rtt_ms / 2, self._draft)
        self._step()

    def _offered(self, window: Fragment) -> None:
        offer = self._pool.offer(window)
        self._note(f"window of {len(window)} for {window.base} came: {offer}")
        self._heard.add(1)
        self._step()

    def _told(self, wait_ms: int) -> None:
        self._waits.ask(1, wait_ms)
        self._step()

    # The device.

    def _delivered(self, position: int, tokens: tuple[int, ...]) -> None:
        self._inbox.append((position, tokens, self._now))
        if not self._drafting:
            self._draft()

    def _draft(self) -> None:
        """Takes what came, and drafts one token if there is one to draft."""
        for position, tokens, at_ms in self._inbox:
            self._take(position, tokens, at_ms)
        self._inbox.clear()
        self._send_windows()
        reading = self._device.plan()
        self._drafting = reading is not None
        if reading is None:
            return
        self._model.rewind(reading.keep)
        top = self._model.forward(reading.ids)
        took_ms = self._noisy(self._at.draft_ms)

        def drafted() -> None:
            self._device.drafted(reading, top)
            self._controller.measurements.drafted(took_ms)
            self._send_windows()
            self._draft()

        self._after(took_ms, drafted)

    def _take(self, position: int, tokens: tuple[int, ...], at_ms: float) -> None:
        counts = self._device.counts
        equal, wrong = counts.equal, counts.wrong
        self._device.commit(position, tokens)
        self._controller.measurements.judge(counts.equal - equal, counts.wrong - wrong)
        if self._last_ms is not None:
            decision = self._controller.committed(len(tokens), at_ms - self._last_ms)
            self._device.decide(decision)
            if decision.wait_ms != self._told_ms:
                self._told_ms = decision.wait_ms
                self._carry(True, lambda: self._told(decision.wait_ms))
        self._last_ms = at_ms
        self._controller.measurements.round_trip(self._noisy(self._at.rtt_ms))

    def _send_windows(self) -> None:
        while (window := self._device.take_window()) is not None:
            self._note(f"sends {len(window)} for {window.base}")
            self._carry(True, partial(self._offered, window))
