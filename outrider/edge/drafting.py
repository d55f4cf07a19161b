"""The thread that drafts on a device.

One model reads one sequence, so one request at a time has drafts; a request that comes meanwhile goes on
without, and says so. The thread owns the model. The thread takes events from a queue, runs one step of the
model, and hands windows to the request's own `send`, which never blocks.
"""

import atexit
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakSet

from outrider.edge.backends import DraftModel
from outrider.edge.controller import Decision
from outrider.edge.device_session import DeviceSession, Terms
from outrider.edge.drafted_request import DraftedRequest, Send
from outrider.edge.measurements import Measurements
from outrider.edge.top_k import DraftModelFailed
from outrider.edge.trials import ModeTrials
from outrider.edge.wire import drafts_to_wire, terms_from_wire
from outrider.v1 import generation_pb2
from speculative.errors import OutriderError, Unavailable

log = logging.getLogger(__name__)

PING_S = 1.0
"""Seconds between two measurements of the round trip while a request runs."""
IDLE_S = 0.2
"""Seconds after which `idle` checks whether the thread still runs."""
PAUSES_S = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Pauses in seconds after the model's first failure, the second and so on."""
AT_EXIT_S = 10.0
"""The longest that the end of the program waits for all threads: for steps of models, or while these load."""


@dataclass(frozen=True, slots=True)
class _Started:
    request: DraftedRequest
    started: generation_pb2.GenerateStarted
    have: tuple[int, ...]
    send: Send


@dataclass(frozen=True, slots=True)
class _Committed:
    request: DraftedRequest
    tokens: generation_pb2.GeneratedTokens
    at_s: float


@dataclass(frozen=True, slots=True)
class _Ended:
    request: DraftedRequest


@dataclass(frozen=True, slots=True)
class _Noted:
    """An event that the thread confirms once all earlier events are handled."""

    handled: threading.Event


@dataclass(frozen=True, slots=True)
class _Lent:
    """A function that uses the model in the thread, and what takes the reason why it was not called."""

    use: Callable[[DraftModel], None]
    failed: Callable[[OutriderError], None]


_Event = _Started | _Committed | _Ended | _Noted | _Lent | None


@dataclass(slots=True)
class _Work:
    """The thread's state of the session for which it drafts."""

    request: DraftedRequest
    session: DeviceSession
    last_s: float | None = None  # when the last tokens came
    pinged_s: float = 0.0  # when the round trip was measured last
    told_epoch: int = 0
    told_wait_ms: int = 0


_threads: "WeakSet[DraftingThread]" = WeakSet()


@atexit.register
def _close_all() -> None:
    """Closes what the program has left open.

    The interpreter ends daemon threads wherever they are, and in torch or another library of C++ that aborts
    the process: "terminate called without an active exception".
    """
    open_ones = [drafting for drafting in _threads if drafting.is_alive]
    for drafting in open_ones:
        drafting.end()
    deadline_s = time.monotonic() + AT_EXIT_S
    for drafting in open_ones:
        drafting.close(max(0.0, deadline_s - time.monotonic()))
        if drafting.is_alive:
            log.warning(
                "%s has not ended its step within %g s; close drafters first", drafting.model_name, AT_EXIT_S
            )


class DraftingThread:
    """Drafts with one model, for one request at a time.

    Args:
        open_model: opens the model; called once, in the thread.
        pauses_s: seconds to pause after each failure of the model in a row; a further one ends the drafts.
        clock: monotonic clock in seconds.
    """

    def __init__(
        self,
        open_model: Callable[[], DraftModel],
        pauses_s: Sequence[float] = PAUSES_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.measurements = Measurements()
        self.trials = ModeTrials()
        self.model_name = ""
        """Name of the model; empty until the model is open."""
        self._pauses_s = pauses_s
        self._clock = clock
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._owner: DraftedRequest | None = None
        self._lock = threading.Lock()
        self._work: _Work | None = None
        self._read: list[int] = []
        self._failures, self._paused_until = 0, 0.0
        self._opened = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run, args=(open_model,), name="outrider-drafts", daemon=True
        )
        self._thread.start()
        _threads.add(self)

    def wait_open(self) -> None:
        """Returns once the model is loaded. Raises OutriderError if it cannot be loaded, or is closed."""
        self._opened.wait()
        if self._failure is not None:
            raise self._failure

    @property
    def is_alive(self) -> bool:
        """Whether the thread has not ended."""
        return self._thread.is_alive()

    @property
    def is_closed(self) -> bool:
        """Whether the model takes no further work: it is closed, closes behind what runs, or has failed."""
        return self._failure is not None

    def claim(self, request: DraftedRequest) -> bool:
        """Reserves the model for a request, which may have it already.

        False: the model is not free, for the reason in `trouble`.
        """
        with self._lock:
            if not self._opened.is_set():
                request.trouble = "the device's model is being loaded"
            elif self._failure is not None:
                request.trouble = str(self._failure)
            elif self._owner is not None and self._owner is not request:
                request.trouble = "the device drafts for another request"
            else:
                self._owner = request
            return self._owner is request

    def received(
        self,
        request: DraftedRequest,
        response: generation_pb2.GenerateResponse,
        have: tuple[int, ...],
        send: Send,
    ) -> None:
        """Takes a message of the request's stream; from any thread.

        Args:
            have: ids of the answer that the client had when the stream began.
            send: sends a message on that stream, without waiting.
        """
        request.bytes_down += response.ByteSize()
        match response.WhichOneof("body"):
            case "started":
                self._events.put(_Started(request, response.started, have, send))
            case "tokens":
                self._events.put(_Committed(request, response.tokens, self._clock()))
            case "finished":
                self.lost(request)

    def lost(self, request: DraftedRequest) -> None:
        """Notes that the request's stream ended or broke: drafting pauses until another stream starts."""
        self._events.put(_Ended(request))

    def release(self, request: DraftedRequest) -> None:
        """Ends the request, so that another request may have the model. A second call does nothing."""
        self.lost(request)
        with self._lock:
            if self._owner is request:
                self._owner = None

    def lend(self, use: Callable[[DraftModel], None], failed: Callable[[OutriderError], None]) -> None:
        """Has the thread call a function with the model; for the request that has claimed the model.

        Args:
            use: raises nothing; may take long.
            failed: called instead of `use` if the model has failed for good, or is closed.
        """
        with self._lock:
            if (failure := self._failure) is None:
                return self._events.put(_Lent(use, failed))
        failed(failure if isinstance(failure, OutriderError) else OutriderError(str(failure)))

    def idle(self) -> None:
        """Returns once all messages received so far are handled."""
        handled = threading.Event()
        self._events.put(_Noted(handled))
        while self._thread.is_alive() and not handled.wait(IDLE_S):
            pass

    def close(self, within_s: float | None = None) -> None:
        """Ends the thread and closes the model; waits for that, but no longer than `within_s` seconds."""
        self.end()
        self._thread.join(within_s)

    def end(self) -> None:
        """Has the thread close the model and end, behind the step that it takes now."""
        with self._lock:  # the thread takes no event behind the last
            self._failure = self._failure or Unavailable("the device's model is closed; open another drafter")
            self._events.put(None)

    def _run(self, open_model: Callable[[], DraftModel]) -> None:
        try:
            model = open_model()
            self.model_name = model.name
        except BaseException as error:  # `wait_open` raises it
            self._failure = error
            return
        finally:
            self._opened.set()
        try:
            while self._take_events(model):
                if self._work is not None:
                    self._draft(model, self._work)
        except Exception as error:  # whatever the model's library raises outside a pass
            log.exception("%s failed outside a pass; it is used no more", model.name)
            self._refuse(DraftModelFailed(f"{model.name} failed: {type(error).__name__}: {error}"))
        finally:
            model.close()

    def _refuse(self, failure: OutriderError) -> None:
        """Answers all events with the model's failure until `close`: nobody waits for a lost model."""
        with self._lock:
            self._failure = failure
        if self._work is not None:
            self._give_up(self._work.request, str(failure))
        while (event := self._events.get()) is not None:
            match event:
                case _Noted():
                    event.handled.set()
                case _Lent():
                    event.failed(failure)
                case _Started() if self._owner is event.request and _takes_drafts(event.started):
                    event.request.send = event.send
                    self._give_up(event.request, str(failure))
                case _:
                    pass  # of a request that goes on without drafts

    def _take_events(self, model: DraftModel) -> bool:
        """Handles received messages; waits if there is nothing to draft. False: the thread must end."""
        timeout: float | None = 0.0
        if not self._has_work():
            pause_s = self._paused_until - self._clock()
            timeout = pause_s if self._work is not None and pause_s > 0 else None
        while True:
            try:
                event = self._events.get(timeout is None or timeout > 0, timeout or None)
            except queue.Empty:
                return True
            if event is None:
                return False
            if isinstance(event, _Noted):
                event.handled.set()
            elif isinstance(event, _Lent):
                event.use(model)
                self._read = []  # whatever the model has read is not this thread's
                model.rewind(0)
            else:
                self._handle(event, model)
            timeout = 0.0

    def _has_work(self) -> bool:
        work = self._work
        return work is not None and self._clock() >= self._paused_until and work.session.plan() is not None

    def _handle(self, event: _Started | _Committed | _Ended, model: DraftModel) -> None:
        work, request = self._work, event.request
        try:
            match event:
                case _Started():
                    self._start(event, model)
                case _Committed() if work is not None and work.request is request:
                    self._commit(work, event)
                case _Ended() if work is not None and work.request is request:
                    self._stop(work)
                case _:
                    pass  # of a request without drafts
        except OutriderError as error:
            self._give_up(request, str(error))

    def _start(self, event: _Started, model: DraftModel) -> None:
        request, device = event.request, event.started.device
        if self._owner is not request:
            return
        if self._work is not None:
            self._stop(self._work)
        # Not earlier: a window of the stream before names an epoch that this one never had, and its server
        # would take no further drafts.
        request.send = event.send
        if not _takes_drafts(event.started):
            request.offered_wait_ms = 0  # no round waits
            self._give_up(request, device.refused or "the server knows nothing of drafts from devices")
            return
        digest = model.digest()
        if digest != device.tokenizer_digest:
            self._give_up(
                request,
                f"{model.name} has vocabulary {digest or 'none'}, the target has {device.tokenizer_digest}: "
                f"their ids mean different tokens",
            )
            return
        terms: Terms = terms_from_wire(event.started, event.have, model.max_length)
        session = DeviceSession(terms, request.controller.decision, self._read)
        session.counts = request.counts
        self._failures, self._paused_until = 0, 0.0
        self._work = _Work(request, session, told_wait_ms=request.offered_wait_ms)
        self._measure(self._work)
        self._tell(self._work)

    def _commit(self, work: _Work, event: _Committed) -> None:
        session, tokens, counts = work.session, event.tokens, work.session.counts
        if tokens.choice:
            return
        equal, wrong = counts.equal, counts.wrong
        session.commit(tokens.position, tokens.ids, tokens.prefix_hash, tokens.epoch)
        self.measurements.judge(counts.equal - equal, counts.wrong - wrong)
        if work.last_s is not None and tokens.ids:
            took_ms = 1000 * (event.at_s - work.last_s)
            before = session.decision
            decision = work.request.controller.committed(len(tokens.ids), took_ms)
            if decision is not before:
                session.decide(decision)
                self._tell(work)
        work.last_s = event.at_s
        if event.at_s >= work.pinged_s + PING_S:
            self._measure(work)

    def _draft(self, model: DraftModel, work: _Work) -> None:
        session = work.session
        self._send_windows(work)
        reading = session.plan()
        if reading is None or self._clock() < self._paused_until:
            return
        began = self._clock()
        try:
            if reading.keep < len(session.read):
                model.rewind(reading.keep)
            top = model.forward(reading.ids)
            session.drafted(reading, top)
        except OutriderError as error:
            self._failed(work, model, str(error))
            return
        except Exception as error:  # whatever the model's library raises; the request goes on without drafts
            log.exception("drafting failed")
            self._failed(work, model, f"{type(error).__name__}: {error}")
            return
        self._failures, work.request.failure = 0, ""
        if len(reading.ids) <= 2:  # else most of the time went into what others wrote
            self.measurements.drafted(1000 * (self._clock() - began))
        self._send_windows(work)

    def _send_windows(self, work: _Work) -> None:
        while (fragment := work.session.take_window()) is not None:
            epoch = work.session.epoch
            told, work.told_epoch = work.told_epoch == epoch, epoch
            self._send(work.request, drafts_to_wire(fragment, epoch=0 if told else epoch))

    def _tell(self, work: _Work) -> None:
        """Tells the server how long rounds may wait, if the time has changed."""
        decision: Decision = work.session.decision
        if decision.wait_ms != work.told_wait_ms:
            work.told_wait_ms = decision.wait_ms
            self._send(work.request, drafts_to_wire(None, wait_ms=decision.wait_ms))

    def _send(self, request: DraftedRequest, message: generation_pb2.GenerateRequest) -> None:
        request.bytes_up += message.ByteSize()
        request.send(message)

    def _measure(self, work: _Work) -> None:
        work.pinged_s = self._clock()
        if work.request.ping is not None:
            work.request.ping(self.measurements.round_trip)

    def _failed(self, work: _Work, model: DraftModel, why: str) -> None:
        """Handles a failure of the model: tries again after a pause, a few times."""
        work.session.failed()
        model.rewind(0)
        if self._failures >= len(self._pauses_s):
            self._give_up(work.request, why)
            return
        log.warning("drafting failed: %s", why)
        work.request.failure = why
        self._paused_until = self._clock() + self._pauses_s[self._failures]
        self._failures += 1

    def _give_up(self, request: DraftedRequest, why: str) -> None:
        """Stops drafting for a request; the request continues."""
        log.warning("the device does not draft: %s", why)
        request.trouble = why
        work = self._work if self._work is not None and self._work.request is request else None
        if request.offered_wait_ms if work is None else work.told_wait_ms:
            self._send(request, drafts_to_wire(None, wait_ms=0))
        if work is not None:
            self._stop(work)

    def _stop(self, work: _Work) -> None:
        self._read = work.session.read
        self._work = None


def _takes_drafts(started: generation_pb2.GenerateStarted) -> bool:
    return started.HasField("device") and not started.device.refused
