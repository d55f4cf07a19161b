"""One verifier as this orchestrator holds it: description, tokenizer, one Watch stream for all sessions.

The link dials until the verifier is there, goes on where a broken stream stopped, and gives the sessions up
once the verifier shows no sign of life. Knows nothing of prompts, clients or other verifiers.
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

from orchestrator.fleet.attempts import Attempts
from orchestrator.fleet.compatibility import Refusal, other_contract
from orchestrator.fleet.liveness import Judge, Verdict
from orchestrator.fleet.reader import Reader
from orchestrator.fleet.served_model import read_tokenizer, target_of
from orchestrator.front.admission import Target
from outrider.tokens import TokenTable
from outrider.v1 import explain_pb2, verifier_pb2
from outrider.v1.verifier_pb2_grpc import VerifierStub
from outrider.wire.channel import DEFAULT_MESSAGE_MB, open_channel
from outrider.wire.codec import SessionKey, key_to_wire
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
PROBE_S = 0.25
GUARD_EVERY_S = 0.1
URGE_EVERY_S = 0.5
REDIAL_S = (0.05, 0.5)
"""First and longest wait before a verifier is dialled again."""


class VerifierLost(Unavailable):
    """The verifier of a session is gone, or knows nothing of it: another can go on."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a verifier may be silent; see liveness.Judge."""

    silent_s: float = 0.75
    stalled_s: float = 60.0


class VerifierLink:
    """Holds one verifier. `run` for as long as it is to be held; the other methods at any time beside it."""

    def __init__(
        self,
        address: str,
        *,
        patience: Patience | None = None,
        max_message_mb: int = DEFAULT_MESSAGE_MB,
        certificates: Certificates | None = None,
    ) -> None:
        self.address = address
        self.target: Target | None = None
        """What it serves; None until it has said so once."""
        self.numerics = ""
        """How it computes, as it says itself."""
        self.fingerprint = ""
        """Its tokenizer's digest and its numerics, once it has said so."""
        self.capacity = 0
        """Sessions that it takes, likewise."""
        self.step_s = 0.0
        """How long its last step was expected to take, idle ones apart."""
        self.refusal: Refusal | None = None
        """Why it is not used, where what it said of itself is the reason."""
        self.reachable = False
        """Whether its beats arrive."""
        self.draining = False
        """Whether they say that it is about to end."""
        self.broken = 0
        """Watch streams that broke so far."""
        self.has_peer: Callable[[], bool] = lambda: False
        """Whether there is another verifier for its sessions."""
        self._patience = patience or Patience()
        self._channel = open_channel(address, max_message_mb, certificates=certificates, role="verifier")
        self._stub: VerifierAsyncStub = VerifierStub(self._channel)
        self._readers: dict[int, Reader] = {}
        self._opening = 0
        self._attempts = Attempts()
        self._aliases = itertools.count(1)
        self._changes = verifier_pb2.WatchRequest()
        self._changed = asyncio.Event()
        self._judge = self._new_judge()
        self._urges_at = 0.0
        self._background: set[asyncio.Task[None]] = set()

    @property
    def sessions(self) -> int:
        """Sessions that are being opened or read here now."""
        return len(self._readers) + self._opening

    async def run(self) -> None:
        """Dial, watch, dial again; ends only by cancellation."""
        guard = asyncio.create_task(self._guard())
        delay, longest = REDIAL_S
        try:
            while True:
                try:
                    await self._learn_or_give_up()
                    await self._watch()
                except (grpc.aio.AioRpcError, OutriderError, ValueError) as error:
                    self._note("verifier out of reach", logging.DEBUG, why=peer_text(str(error)))
                delay = REDIAL_S[0] if self.reachable else min(2 * delay, longest)
                await asyncio.sleep(delay)
        finally:
            guard.cancel()
            for task in self._background:
                task.cancel()
            await self._channel.close()

    async def open(self, message: verifier_pb2.OpenRequest, timeout_s: float) -> verifier_pb2.OpenResponse:
        """Start a session there. Raises what the verifier answers, and Unavailable once it is given up."""
        with rpc_errors():
            call = self._stub.Open(message, timeout=timeout_s, metadata=current().metadata)
            return await self._attempts.answer(call)

    @contextmanager
    def opening(self, count: int) -> Iterator[None]:
        """So many sessions are about to be opened there: they count from now on."""
        self._opening += count
        try:
            yield
        finally:
            self._opening -= count

    def read(self, key: SessionKey, epoch: int, position: int, wake: asyncio.Event) -> Reader:
        """Have this session's tokens from `position` on brought by the Watch stream, until `leave`.

        `wake` is set whenever there is something to take.
        """
        reader = Reader(next(self._aliases) & 0xFFFFFFFF, key, epoch, position, wake)
        self._readers[reader.alias] = reader
        self._changes.add.append(_cursor(reader))
        self._changed.set()
        return reader

    def leave(self, reader: Reader) -> None:
        """Read this session no longer."""
        if self._readers.pop(reader.alias, None) is not None:
            self._changes.drop.append(reader.alias)
            self._changed.set()

    async def cancel(self, key: SessionKey, epoch: int) -> bool:
        """End the session there; whether one was running. Raises what the verifier answers."""
        request = verifier_pb2.VerifierCancelRequest(key=key_to_wire(key), epoch=epoch)
        with rpc_errors():
            response: verifier_pb2.VerifierCancelResponse = await self._stub.Cancel(request, timeout=CANCEL_S)
            return response.found

    async def explain(self, key: SessionKey) -> explain_pb2.ExplainResponse:
        """What it knows of a session's rounds. Raises what the verifier answers."""
        request = explain_pb2.ExplainRequest(key=key_to_wire(key))
        with rpc_errors():
            response: explain_pb2.ExplainResponse = await self._stub.Explain(request, timeout=CANCEL_S)
            return response

    def cancel_soon(self, key: SessionKey, epoch: int) -> None:
        """The same with nobody waiting: one that cannot be reached ends it when it misses its reader."""
        self._spawn(self._cancel_quietly(key, epoch))

    async def _cancel_quietly(self, key: SessionKey, epoch: int) -> None:
        with suppress(OutriderError):
            await self.cancel(key, epoch)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _learn_or_give_up(self) -> None:
        """A verifier whose stream broke and that takes no call either is gone: nobody need wait for more."""
        try:
            await self._learn()
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                self._give_up(f"cannot be reached ({peer_text(error.details() or 'no reason given')})")
            raise

    async def _learn(self) -> None:
        """Describe, and the tokenizer where it is a new one."""
        said = await self._stub.Describe(verifier_pb2.VerifierDescribeRequest(), timeout=DESCRIBE_S)
        self.refusal = other_contract(said.contract)
        if self.refusal is not None:
            raise InvalidRequest(self.refusal.why)
        self.numerics = said.numerics
        known = self.target
        same = known is not None and known.tokenizer_digest == said.tokenizer_digest
        tokens = known.tokens if known is not None and same else None
        if said.tokenizer_digest and tokens is None:
            tokens = await self._tokenizer()
        self.fingerprint = f"{said.tokenizer_digest or 'no tokenizer'}, {said.numerics or 'any numerics'}"
        self.capacity = said.max_sessions
        self.target = target_of(said, tokens)

    async def _tokenizer(self) -> TokenTable:
        chunks = [
            chunk.data
            async for chunk in self._stub.Tokenizer(verifier_pb2.TokenizerRequest(), timeout=TOKENIZER_S)
        ]
        return await asyncio.to_thread(read_tokenizer, b"".join(chunks))

    async def _watch(self) -> None:
        """Hold one Watch stream until it breaks."""
        call = self._stub.Watch()
        self._changes = verifier_pb2.WatchRequest(add=[_cursor(reader) for reader in self._readers.values()])
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
                changes, self._changes = self._changes, verifier_pb2.WatchRequest()
                await call.write(changes)

    def _receive(self, response: verifier_pb2.WatchResponse) -> None:
        if not self.reachable:
            self._note("verifier reached", logging.INFO)
            self._judge = self._new_judge()
        self.reachable = True
        self.draining = response.beat.draining
        self.step_s = response.beat.expected_us * 1e-6 or self.step_s
        self._judge.beat(time.monotonic(), response.beat.expected_us)
        for committed in response.committed:
            if (reader := self._readers.get(committed.alias)) is not None:
                reader.feed(committed)

    def _new_judge(self) -> Judge:
        return Judge(time.monotonic(), silent_s=self._patience.silent_s, stalled_s=self._patience.stalled_s)

    async def _guard(self) -> None:
        """Ask a silent verifier directly, and give its sessions up where it is dead."""
        while True:
            await asyncio.sleep(GUARD_EVERY_S)
            verdict = self._judge.verdict(time.monotonic(), lone=not self.has_peer())
            if verdict is Verdict.DEAD:
                silence = self._judge.silence(time.monotonic())
                self._give_up(f"gave no sign of life for {silence:.1f} s")
            elif verdict is Verdict.SUSPECT:
                await self._probe()
            if self.draining and self.reachable and self.has_peer():
                self._urge(time.monotonic())

    def _urge(self, now: float) -> None:
        """Its sessions should go elsewhere; those that cannot are urged again."""
        if now >= self._urges_at:
            self._urges_at = now + URGE_EVERY_S
            for reader in self._readers.values():
                reader.urge()

    async def _probe(self) -> None:
        with suppress(grpc.aio.AioRpcError):
            await self._stub.Describe(verifier_pb2.VerifierDescribeRequest(), timeout=PROBE_S)
            self._judge.answered(time.monotonic())

    def _give_up(self, why: str) -> None:
        if self.reachable:
            self._note("verifier lost", logging.INFO if self.draining else logging.WARNING, why=why)
        self.reachable = False
        error = VerifierLost(f"verifier {self.address} {why}")
        for reader in self._readers.values():
            reader.fail(error)
        if self.has_peer():  # which can be asked instead; else it may be back in time
            self._attempts.give_up(str(error))

    def _note(self, event: str, level: int, **fields: object) -> None:
        log.log(level, event, extra={"fields": {"peer": self.address, "sessions": self.sessions, **fields}})


def _cursor(reader: Reader) -> verifier_pb2.Cursor:
    return verifier_pb2.Cursor(
        alias=reader.alias, key=key_to_wire(reader.key), epoch=reader.epoch, position=reader.position
    )
