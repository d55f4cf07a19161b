"""The link to one verifier: its description, its tokenizer, and one Watch stream for all sessions.

The link dials until the verifier answers, resumes a broken stream where it stopped, and gives the sessions up
once the verifier shows no sign of life. It knows nothing of prompts, clients or other verifiers.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc.aio

from orchestrator.fleet.compatibility import Refusal, contract_refusal, message_refusal
from orchestrator.fleet.liveness import SILENT_S, STALLED_S, LivenessJudge, Verdict
from orchestrator.fleet.peers import turn_to_call
from orchestrator.fleet.target_model import TargetModel, read_tokenizer, target_from_wire
from outrider.runtime.backoff import Backoff
from outrider.tokens import TokenTable
from outrider.v1 import explain_pb2, verifier_pb2
from outrider.v1.verifier_pb2_grpc import VerifierStub
from outrider.wire.channel import DEFAULT_MESSAGE_MB, open_channel
from outrider.wire.codec import SessionKey, key_to_wire
from outrider.wire.incoming.shape import BATCH_ENTRIES
from outrider.wire.origin import current
from outrider.wire.status import peer_text, rpc_errors
from outrider.wire.tls import Certificates
from speculative.errors import InvalidRequest, OutriderError, Unavailable

if TYPE_CHECKING:
    from outrider.v1.verifier_pb2_grpc import VerifierAsyncStub  # a name of the type stubs only

log = logging.getLogger(__name__)

DESCRIBE_S = 5.0
TOKENIZER_S = 60.0
CANCEL_S = 2.0
GUARD_EVERY_S = 0.1
MOVE_EVERY_S = 0.5
"""How often the sessions of a draining verifier are asked to move, in seconds."""
REDIAL_S = (0.05, 0.5)
"""First and longest pause before the link dials a verifier again, in seconds."""


class VerifierLost(Unavailable):
    """The verifier of a session is gone, or has lost the session: another verifier can go on."""


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds that a verifier may be silent; see LivenessJudge."""

    silent_s: float = SILENT_S
    stalled_s: float = STALLED_S


class SessionReader:
    """One session's cursor on the Watch stream, with the messages that its request has not taken yet.

    The link makes and feeds the reader; the request takes from it. A reader holds at most what the session's
    own limit allows: its committed tokens and one end.
    """

    def __init__(
        self, alias: int, key: SessionKey, epoch: int, position: int, wake: asyncio.Event, interval_ms: int
    ) -> None:
        self.alias = alias
        self.key = key
        self.epoch = epoch
        self.position = position
        """Tokens that have arrived, prompt included: where a reopened stream goes on."""
        self.interval_ms = interval_ms
        self.error: OutriderError | None = None
        """Why no further message will come; None while more may."""
        self.should_move = False
        """Whether the session should move to another verifier."""
        self._arrived: list[verifier_pb2.Committed] = []
        self._wake = wake

    def feed(self, committed: verifier_pb2.Committed) -> None:
        """Add a message of the stream."""
        self.position = max(self.position, committed.position + len(committed.ids))
        self._arrived.append(committed)
        self._wake.set()

    def fail(self, error: OutriderError) -> None:
        """End the reader with this error, unless it has failed before."""
        self.error = self.error or error
        self._wake.set()

    def urge(self) -> None:
        """Ask for the session to move to another verifier while this one still has it."""
        self.should_move = True
        self._wake.set()

    def take(self) -> list[verifier_pb2.Committed]:
        """Take all messages that came since the last call."""
        arrived, self._arrived = self._arrived, []
        return arrived


class VerifierLink:
    """Holds one verifier's description and Watch stream.

    `run` the link for as long as the verifier is wanted; call the other methods at any time.
    """

    def __init__(
        self,
        address: str,
        *,
        patience: Patience | None = None,
        max_message_mb: int = DEFAULT_MESSAGE_MB,
        certificates: Certificates | None = None,
        first_calls: asyncio.Semaphore | None = None,
    ) -> None:
        self.address = address
        self.target: TargetModel | None = None
        """The model that the verifier serves; None until the verifier has described it."""
        self.numerics = ""
        """Description of the verifier's arithmetic (device, dtype, kernels), in its own words."""
        self.fingerprint = ""
        """The verifier's tokenizer digest and numerics; empty until it has described itself."""
        self.capacity = 0
        """The most sessions that the verifier takes; 0 until it has described itself."""
        self.step_s = 0.0
        """Expected duration of the verifier's last step that was not idle, in seconds."""
        self.refusal: Refusal | None = None
        """Why the verifier is not used, where its own description is the reason."""
        self.reachable = False
        """Whether the verifier's beats arrive."""
        self.draining = False
        """Whether the verifier's beats say that it is about to end."""
        self.first_attempt_done = asyncio.Event()
        """Set once the verifier's beats arrive, or the first attempt to reach it has failed."""
        self.broken = 0
        """Number of Watch streams that broke so far."""
        self.has_peer: Callable[[], bool] = lambda: False
        """Says whether another verifier could take this verifier's sessions."""
        self._patience = patience or Patience()
        self._answered = False
        self._first_calls = first_calls
        self._max_message_mb = max_message_mb
        self._channel = open_channel(address, max_message_mb, certificates=certificates, role="verifier")
        self._stub: VerifierAsyncStub = VerifierStub(self._channel)
        self._readers: dict[int, SessionReader] = {}
        self._opening = 0
        self._given_up: set[asyncio.Future[Unavailable]] = set()
        """One future for each Open under way; a result ends the wait for that Open."""
        self._aliases = itertools.count(1)
        self._added: dict[int, SessionReader] = {}
        """Readers that the Watch stream is yet to hear of, by alias."""
        self._dropped: list[int] = []
        """Aliases of readers that left, which the stream has heard of."""
        self._changed = asyncio.Event()
        self._judge = self._new_judge()
        self._is_probing = False
        self._urges_at = 0.0
        self._background: set[asyncio.Task[None]] = set()
        self._hung_up = False

    @property
    def sessions(self) -> int:
        """Number of sessions that this orchestrator opens or reads at the verifier now."""
        return len(self._readers) + self._opening

    async def run(self) -> None:
        """Dial, watch, dial again; ends only by cancellation."""
        guard = asyncio.create_task(self._guard())
        backoff = Backoff(*REDIAL_S)
        try:
            while True:
                try:
                    await self._describe_or_give_up()
                    await self._watch()
                except (grpc.aio.AioRpcError, OutriderError, ValueError) as error:
                    self._note("verifier out of reach", logging.DEBUG, why=peer_text(str(error)))
                except Exception:  # a fault of this code costs one stream, never the verifier
                    log.exception("verifier link failed", extra={"fields": {"peer": self.address}})
                    await asyncio.sleep(REDIAL_S[1])
                self.first_attempt_done.set()
                if self.reachable:
                    backoff.reset()
                await asyncio.sleep(backoff.next_s())
        finally:
            self.first_attempt_done.set()  # a start need not wait for a verifier that left meanwhile
            guard.cancel()
            for task in self._background:
                task.cancel()
            self._hung_up = True
            await self._channel.close()

    async def open(self, message: verifier_pb2.OpenRequest, timeout_s: float) -> verifier_pb2.OpenResponse:
        """Open a session at the verifier.

        Raises the verifier's own error, and Unavailable as soon as the link gives the verifier up (a frozen
        process answers only when it wakes) or hangs up.
        """
        given_up: asyncio.Future[Unavailable] = asyncio.get_running_loop().create_future()
        self._given_up.add(given_up)
        with self._call_errors():
            call = self._stub.Open(message, timeout=timeout_s, metadata=current().metadata)
            answer: asyncio.Future[verifier_pb2.OpenResponse] = asyncio.ensure_future(call)
            try:
                await asyncio.wait((answer, given_up), return_when=asyncio.FIRST_COMPLETED)
                if not answer.done():
                    raise given_up.result()
                return answer.result()
            finally:
                self._given_up.discard(given_up)
                answer.cancel()

    @contextmanager
    def opening(self, count: int) -> Iterator[None]:
        """Count this many more sessions at the verifier while their Opens are under way."""
        self._opening += count
        try:
            yield
        finally:
            self._opening -= count

    def read(
        self, key: SessionKey, epoch: int, position: int, wake: asyncio.Event, interval_ms: int = 0
    ) -> SessionReader:
        """Have the Watch stream bring this session's tokens from `position` on, until `leave`.

        The reader sets `wake` whenever there is a message to take: one a round, or at most one each
        `interval_ms`, but for the session's first and last tokens.
        """
        alias = next(self._aliases) & 0xFFFFFFFF
        reader = SessionReader(alias, key, epoch, position, wake, interval_ms)
        self._readers[reader.alias] = reader
        self._added[reader.alias] = reader
        self._changed.set()
        return reader

    def leave(self, reader: SessionReader) -> None:
        """Stop reading this session."""
        if self._readers.pop(reader.alias, None) is None:
            return
        # The verifier drops before it adds: one that it has not heard of must not be named at all.
        if self._added.pop(reader.alias, None) is None:
            self._dropped.append(reader.alias)
            self._changed.set()

    async def cancel(self, key: SessionKey, epoch: int) -> bool:
        """End a session at the verifier; returns whether it was running. Raises the verifier's error."""
        request = verifier_pb2.VerifierCancelRequest(key=key_to_wire(key), epoch=epoch)
        with self._call_errors():
            response: verifier_pb2.VerifierCancelResponse = await self._stub.Cancel(request, timeout=CANCEL_S)
            return response.found

    async def explain(self, key: SessionKey, *, nodes: bool) -> explain_pb2.ExplainResponse:
        """The verifier's record of a session's rounds, with trees if `nodes`. Raises the verifier's error."""
        request = explain_pb2.ExplainRequest(key=key_to_wire(key), nodes=nodes)
        with self._call_errors():
            response: explain_pb2.ExplainResponse = await self._stub.Explain(request, timeout=CANCEL_S)
            return response

    def cancel_soon(self, key: SessionKey, epoch: int) -> None:
        """End a session at the verifier without waiting for the answer.

        A verifier that cannot be reached ends the session by itself once the session's reader is missing.
        """
        self._spawn(self._cancel_quietly(key, epoch))

    @contextmanager
    def _call_errors(self) -> Iterator[None]:
        """Raise a failed call's error, and Unavailable where the link has hung up."""
        try:
            with rpc_errors():
                yield
        except (grpc.aio.UsageError, asyncio.CancelledError) as error:
            if not self._hung_up or ((task := asyncio.current_task()) and task.cancelling()):
                raise  # else gRPC cancelled the call, and not its caller, as it closed the channel
            raise Unavailable(f"verifier {self.address} has left") from error

    async def _cancel_quietly(self, key: SessionKey, epoch: int) -> None:
        with suppress(OutriderError):
            await self.cancel(key, epoch)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _describe_or_give_up(self) -> None:
        """Ask the verifier for its description; give its sessions up where it takes no call either.

        A verifier whose stream broke and which accepts no call is gone: no request need wait any longer.
        """
        try:
            await self._describe()
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                self._give_up(f"cannot be reached ({peer_text(error.details() or 'no reason given')})")
            raise

    async def _describe(self) -> None:
        """Fetch the verifier's description, and its tokenizer if that is new."""
        async with turn_to_call(self._first_calls, self._answered):
            described = await self._stub.Describe(verifier_pb2.VerifierDescribeRequest(), timeout=DESCRIBE_S)
        self._answered = True
        self.refusal = contract_refusal(described.contract) or message_refusal(
            described.max_length, described.vocabulary_size, self._max_message_mb
        )
        if self.refusal is not None:
            raise InvalidRequest(self.refusal.why)
        self.numerics = described.numerics
        known, digest = self.target, described.tokenizer_digest
        tokens = known.tokens if known is not None and known.tokenizer_digest == digest else None
        if digest and tokens is None:
            tokens = await self._tokenizer()
        self.fingerprint = f"{digest or 'no tokenizer'}, {described.numerics or 'any numerics'}"
        self.capacity = described.max_sessions
        self.target = target_from_wire(described, tokens)

    async def _tokenizer(self) -> TokenTable:
        chunks = [
            chunk.data
            async for chunk in self._stub.Tokenizer(verifier_pb2.TokenizerRequest(), timeout=TOKENIZER_S)
        ]
        return await asyncio.to_thread(read_tokenizer, b"".join(chunks))

    async def _watch(self) -> None:
        """Hold one Watch stream until it breaks."""
        call = self._stub.Watch()
        self._added, self._dropped = dict(self._readers), []
        self._changed.set()
        writer = asyncio.create_task(self._send_changes(call))
        try:
            async for response in call:
                self._receive(response)
        finally:
            writer.cancel()
            call.cancel()
            self.broken += self.reachable

    async def _send_changes(self, call: Any) -> None:
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the reading side sees why
            while True:
                await self._changed.wait()
                self._changed.clear()
                cursors = [_cursor(reader) for reader in self._added.values()]
                dropped, self._added, self._dropped = self._dropped, {}, []
                for batch in _batches(dropped, cursors):
                    await call.write(batch)

    def _receive(self, response: verifier_pb2.WatchResponse) -> None:
        """Take one message of the stream: a beat, and what sessions committed."""
        if not self.reachable:
            self._note("verifier reached", logging.INFO)
            self._judge = self._new_judge()
        self.reachable = True
        self.first_attempt_done.set()
        self.draining = response.beat.draining
        self.step_s = response.beat.expected_us * 1e-6 or self.step_s
        self._judge.beat(time.monotonic(), response.beat.expected_us)
        for committed in response.committed:
            if (reader := self._readers.get(committed.alias)) is not None:
                reader.feed(committed)

    def _new_judge(self) -> LivenessJudge:
        patience = self._patience
        return LivenessJudge(time.monotonic(), silent_s=patience.silent_s, stalled_s=patience.stalled_s)

    async def _guard(self) -> None:
        """Probe a silent verifier, give the sessions of a dead one up, and move those of a draining one."""
        while True:
            due = time.monotonic() + GUARD_EVERY_S
            await asyncio.sleep(GUARD_EVERY_S)
            try:
                await self._check(due)
            except Exception:  # without its guard a link never gives a silent verifier up
                log.exception("a verifier was not checked", extra={"fields": {"peer": self.address}})

    async def _check(self, due: float) -> None:
        """Check the verifier once; `due` is the time at which this was to happen."""
        now = time.monotonic()
        if now - due > GUARD_EVERY_S:
            self._judge.stood_still(now, now - due)
        verdict = self._judge.verdict(now, lone=not self.has_peer())
        if verdict is Verdict.DEAD:
            silence = self._judge.silence(now)
            self._give_up(f"gave no sign of life for {silence:.1f} s")
        elif verdict is Verdict.SUSPECT and not self._is_probing:
            self._is_probing = True
            self._spawn(self._probe())  # a frozen verifier answers no probe, and the checks go on meanwhile
        if self.draining and self.reachable and self.has_peer():
            self._urge(time.monotonic())

    def _urge(self, now: float) -> None:
        """Ask all sessions to move elsewhere, again and again while some could not."""
        if now >= self._urges_at:
            self._urges_at = now + MOVE_EVERY_S
            for reader in self._readers.values():
                reader.urge()

    async def _probe(self) -> None:
        try:
            with suppress(grpc.aio.AioRpcError):
                request = verifier_pb2.VerifierDescribeRequest()
                await self._stub.Describe(request, timeout=self._patience.silent_s / 2)
                self._judge.answered(time.monotonic())
        finally:
            self._is_probing = False

    def _give_up(self, why: str) -> None:
        """Fail all readers; fail Opens under way too where another verifier could take their sessions."""
        if self.reachable:
            self._note("verifier lost", logging.INFO if self.draining else logging.WARNING, why=why)
        self.reachable = False
        error = VerifierLost(f"verifier {self.address} {why}")
        for reader in self._readers.values():
            reader.fail(error)
        if not self.has_peer():  # this verifier may be back in time, and no other can be asked
            return
        for given_up in self._given_up:
            if not given_up.done():
                given_up.set_result(Unavailable(str(error)))

    def _note(self, event: str, level: int, **fields: object) -> None:
        log.log(level, event, extra={"fields": {"peer": self.address, "sessions": self.sessions, **fields}})


def _batches(dropped: list[int], cursors: list[verifier_pb2.Cursor]) -> Iterator[verifier_pb2.WatchRequest]:
    """The changes in pieces: behind a broken stream they name every session.

    A cursor takes some 1 KiB at most, most of that its session's name.
    """
    for at in range(0, len(dropped), BATCH_ENTRIES):
        yield verifier_pb2.WatchRequest(drop=dropped[at : at + BATCH_ENTRIES])
    most = BATCH_ENTRIES // 2
    for at in range(0, len(cursors), most):
        yield verifier_pb2.WatchRequest(add=cursors[at : at + most])


def _cursor(reader: SessionReader) -> verifier_pb2.Cursor:
    return verifier_pb2.Cursor(
        alias=reader.alias,
        key=key_to_wire(reader.key),
        epoch=reader.epoch,
        position=reader.position,
        interval_ms=reader.interval_ms,
    )
