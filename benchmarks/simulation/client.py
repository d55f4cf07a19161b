"""A simulated client: the real stream and resuming of outrider.client, as one user's process drives them."""

import asyncio
import contextvars
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from grpc.aio import AioRpcError

from benchmarks.simulation.calls import Channel
from benchmarks.simulation.clock import Process
from benchmarks.simulation.device import SimulatedDevice
from benchmarks.simulation.network import Network
from benchmarks.simulation.plan import Turn
from benchmarks.simulation.request_checker import RequestChecker
from benchmarks.simulation.streams import SimulatedStream
from benchmarks.simulation.toy import MODEL, hash_of
from outrider.client.async_client import AsyncStream
from outrider.client.completions import CompletionBuilder
from outrider.client.endpoints import SEVERAL_S
from outrider.client.resuming import Resuming
from outrider.v1 import common_pb2, generation_pb2, verifier_pb2
from outrider.v1.generation_pb2_grpc import GenerationStub
from outrider.v1.verifier_pb2_grpc import VerifierStub
from outrider.wire.status import rpc_errors
from speculative.errors import IdsNeeded, OutriderError, Overloaded, StaleEpoch, Superseded, Unavailable

MOVED_S = 3.0
"""Seconds for which a stream may be silent whose verifier freezes: 0.75 s and a probe until the verifier is
given up, and the session's move to another one with every message late."""
SLACK_S = 2.0
"""Seconds that a request may still run after its deadline, until its client notices."""


class SimulatedClient:
    """One user's process.

    Args:
        orchestrators: the orchestrators' addresses.
        violated: takes a sentence about a rule that does not hold.
        counts: counts of events by name, to which the client adds its own.
        silent_s: seconds for which a stream may be silent, from its request on.
    """

    def __init__(
        self,
        network: Network,
        name: str,
        session: str,
        orchestrators: Sequence[str],
        verifiers: Sequence[str],
        violated: Callable[[str], None],
        counts: Counter[str],
        silent_s: float = math.inf,
    ) -> None:
        self.process = Process(network.loop, name)
        self._network = network
        self._session = session
        self._violated = violated
        self._counts = counts
        self._silent_s = silent_s

        def dialled(address: str) -> Any:
            return self.process.run(Channel, network, address)

        self._stubs: list[Any] = [GenerationStub(dialled(address)) for address in orchestrators]
        self._verifiers: list[Any] = [VerifierStub(dialled(address)) for address in verifiers]
        self._drafted: dict[str, list[generation_pb2.GenerateRequest]] = {}
        """Windows that the device has sent, by the checker's name."""
        self.cancelled_at: float | None = None
        """When a Cancel was answered with success, on the loop's clock."""

    def checker(self, name: str, prompt: Sequence[int], turn: Turn) -> RequestChecker:
        """Checks a request's streams against the rules and its golden output."""
        report = (self._violated, self._counts, self._network.loop.time, self._silent_s)
        checker = RequestChecker(name, prompt, turn.seed, turn.n, turn.max_tokens, *report)
        checker.is_claimed = turn.device == "claiming"
        return checker

    def request(self, prompt: Sequence[int], turn: Turn) -> generation_pb2.GenerateRequest:
        """The request for a turn, as `build_request` makes it."""
        start = generation_pb2.GenerateStart(
            session=self._session,
            model=MODEL,
            ids=generation_pb2.TokenIds(ids=prompt),
            max_tokens=turn.max_tokens,
            sampling=common_pb2.Sampling(temperature=0.0),
            seed=turn.seed,
            n=turn.n,
            resumable=turn.resumable,
            speculation=generation_pb2.Speculation(enabled=turn.speculate),
        )
        if turn.device:
            start.device.wait_ms = 100 if turn.seed % 2 else 0
        elif turn.seed % 4 == 0:
            start.message_interval_ms = 200
        return generation_pb2.GenerateRequest(start=start)

    def stream(
        self,
        request: generation_pb2.GenerateRequest,
        turn: Turn,
        checker: RequestChecker,
        first: int,
        before: CompletionBuilder | None = None,
        by_hash: bool = False,
    ) -> AsyncStream:
        """A real client stream whose messages the checker sees.

        Args:
            first: index of the orchestrator that is asked first.
            before: what an earlier stream of the request has brought; the new stream resumes from there.
            by_hash: whether the request names those tokens by number and hash.
        """
        loop = self._network.loop
        ends = None if turn.timeout_s is None else loop.now + turn.timeout_s

        def ask(resuming: Resuming) -> Any:
            checker.asked()
            timeout = None if ends is None else max(0.001, ends - loop.now)
            stub = self._stubs[resuming.orchestrator]
            if turn.device:
                return self._with_device(stub.Generate(timeout=timeout), resuming.request, turn, checker)
            call = stub.Generate(iter((resuming.request,)), timeout=timeout)
            call.on_message = checker.message
            return call

        resuming = Resuming(request, len(self._stubs), SEVERAL_S, first, ends)
        if before is not None:
            resuming.again(Unavailable("its user was away"), before, loop.now)
            if by_hash:
                _by_hash(resuming.request.start, checker.prompt)
        stream = AsyncStream(ask, resuming, turn.n)
        if before is not None:
            stream._builder = before
        return stream

    def _with_device(
        self, call: Any, request: generation_pb2.GenerateRequest, turn: Turn, checker: RequestChecker
    ) -> Any:
        """The call, on which the request is followed by what the client's device drafts."""
        chance = random.Random(turn.seed)
        past = self._drafted.setdefault(checker.name, [])
        device = SimulatedDevice(turn.device, call, turn.seed, checker, chance, self.process.spawn, past)

        def on_message(response: generation_pb2.GenerateResponse) -> None:
            checker.message(response)
            device.message(response)

        async def begin() -> None:
            with suppress(AioRpcError, asyncio.InvalidStateError):  # the reader of the call says so
                await call.write(request)

        call.on_message = on_message
        self.process.spawn(begin())
        self._counts["devices"] += 1
        return call

    async def read(self, stream: AsyncStream, turn: Turn, checker: RequestChecker) -> bool:
        """Reads the stream to its end; True where the request got a whole answer."""
        loop = self._network.loop
        ends = None if turn.timeout_s is None else loop.now + turn.timeout_s
        if ends is not None:
            loop.call_at(ends, self._may_end, checker)
        self._counts["requests"] += 1
        try:
            await stream.completion()
            self._counts["answers"] += 1
            checker.check_answer()
        except Superseded as error:
            if not checker.times_over:
                self._violated(f"{checker.name}: taken over by nobody: {error}")
            self._counts["taken over"] += 1
            return False
        except (Unavailable, Overloaded) as error:
            if ends is None or loop.now < ends:
                self._violated(f"{checker.name}: given up at {loop.now:.3f}: {error}")
            return False
        except IdsNeeded:
            self._counts["ids needed"] += 1
            raise
        except OutriderError as error:
            self._violated(f"{checker.name}: {type(error).__name__}: {error}")
            return False
        finally:
            if ends is not None and loop.now > ends + SLACK_S:
                self._violated(f"{checker.name}: ended {loop.now - ends:.1f} s after its deadline")
        return True

    @staticmethod
    def _may_end(checker: RequestChecker) -> None:
        checker.may_be_cancelled = True

    def sleep(self, seconds: float, checker: RequestChecker) -> None:
        """Freezes the client from now on for `seconds`: a device whose lid is closed."""

        def wake() -> None:
            checker.woke()
            self.process.wake()
            for stream in self._streams():
                self._network.doubt(stream)

        self.process.freeze()
        for stream in self._streams():
            self._network.doubt(stream)
        # The alarm belongs to no process, so that nobody's sleep delays it.
        self._network.loop.call_later(seconds, wake, context=contextvars.Context())

    def lose_connection(self, unheard_s: float) -> None:
        """Breaks the client's streams; servers hear of it `unheard_s` seconds later."""
        for stream in self._streams():
            stream.break_off("connection reset", unheard_s)

    def vanish(self, unheard_s: float) -> None:
        """Ends the client for good, whatever it is sending; servers hear of it `unheard_s` seconds later."""
        self.lose_connection(unheard_s)
        self.process.kill()

    def _streams(self) -> list[SimulatedStream]:
        return [stream for stream in self._network.streams if stream.client is self.process]

    async def cancel(self, checker: RequestChecker, orchestrators: Sequence[int]) -> None:
        """Sends a Cancel to one orchestrator after the other until one answers."""
        checker.may_be_cancelled = True
        for index in orchestrators:
            try:
                with rpc_errors():
                    message = generation_pb2.CancelRequest(session=self._session)
                    answer = await self._stubs[index].Cancel(message, timeout=3.0)
            except OutriderError:
                continue
            if answer.found:
                self._counts["cancels answered"] += 1
                self.cancelled_at = self._network.loop.now
            return

    async def send_stale(self, checker: RequestChecker, turn: Turn) -> None:
        """Sends Open and Cancel under a long outdated epoch to every verifier."""
        key = common_pb2.SessionKey(tenant="default", session=self._session)
        epoch = max(1, (checker.epoch >> 1))
        if not checker.epoch:
            return
        opening = verifier_pb2.OpenRequest(
            key=key, epoch=epoch, model=MODEL, ids=[1, 2], prompt_length=2, limit=5, seed=turn.seed
        )
        cancelling = verifier_pb2.VerifierCancelRequest(key=key, epoch=epoch)
        await asyncio.gather(
            *(self._quietly(stub.Cancel, cancelling) for stub in self._verifiers),
            *(self._quietly(stub.Open, opening) for stub in self._verifiers),
        )

    async def _quietly(self, call: Any, message: Any) -> None:
        try:
            with rpc_errors():
                await call(message, timeout=1.0)
        except (StaleEpoch, Unavailable, Overloaded):
            pass


def _by_hash(start: generation_pb2.GenerateStart, prompt: Sequence[int]) -> None:
    """Replaces the ids that the client has by their number and hash."""
    for have in start.have:
        if ids := list(have.ids):
            have.CopyFrom(generation_pb2.TokenIds(count=len(ids), prefix_hash=hash_of([*prompt, *ids])))
