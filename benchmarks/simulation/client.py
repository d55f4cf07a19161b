"""A simulated client: the real stream and resuming of outrider.client, and what users do with them."""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.simulation.calls import Channel
from benchmarks.simulation.clock import Process
from benchmarks.simulation.network import Network
from benchmarks.simulation.plan import Turn
from benchmarks.simulation.toy import MODEL, hash_of
from benchmarks.simulation.watching import Watch
from outrider.asking import SEVERAL_S
from outrider.async_client import AsyncStream
from outrider.resuming import Resuming
from outrider.v1 import common_pb2, generation_pb2, verifier_pb2
from outrider.v1.generation_pb2_grpc import GenerationStub
from outrider.v1.verifier_pb2_grpc import VerifierStub
from outrider.wire.status import rpc_errors
from speculative.errors import IdsNeeded, OutriderError, Overloaded, StaleEpoch, Superseded, Unavailable

MOVED_S = 3.0
"""How long a stream may be silent whose verifier freezes: 0.75 s and a probe until it is given up, and the
way of its session to another, every message of it late."""
SLACK_S = 2.0
"""How long after its deadline a request may still run, for a client that has to find out."""


class Client:
    """One user's process.

    Args:
        orchestrators: addresses.
        violated: told what does not hold.
        counts: of what has happened; added to.
        silent_s: how long a stream may be silent, from when it is asked for.
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
        self.cancelled_at: float | None = None
        """When a Cancel was answered with success."""

    def watch(self, name: str, prompt: Sequence[int], turn: Turn) -> Watch:
        """What must hold of a request."""
        told = (self._violated, self._counts, self._network.loop.time, self._silent_s)
        return Watch(name, prompt, turn.seed, turn.n, turn.max_tokens, *told)

    def request(self, prompt: Sequence[int], turn: Turn) -> generation_pb2.GenerateRequest:
        """As `build_request` makes it."""
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
        return generation_pb2.GenerateRequest(start=start)

    def stream(
        self,
        request: generation_pb2.GenerateRequest,
        turn: Turn,
        watch: Watch,
        first: int,
        before: AsyncStream | None = None,
        by_hash: bool = False,
    ) -> AsyncStream:
        """The real one, with a look at each message.

        It goes on with what the one before has, as after a loss, and may name that by number and hash.
        """
        loop = self._network.loop
        ends = None if turn.timeout_s is None else loop.now + turn.timeout_s

        def ask(resuming: Resuming) -> Any:
            watch.asked()
            timeout = None if ends is None else max(0.001, ends - loop.now)
            call = self._stubs[resuming.orchestrator].Generate(iter((resuming.request,)), timeout=timeout)
            call.on_message = watch.message
            return call

        resuming = Resuming(request, len(self._stubs), SEVERAL_S, first, ends)
        if before is not None:
            resuming.again(Unavailable("its user was away"), before._folding, loop.now)
            if by_hash:
                _by_hash(resuming.request.start, watch.prompt)
        stream = AsyncStream(ask, resuming, turn.n)
        if before is not None:
            stream._folding = before._folding
        return stream

    async def read(self, stream: AsyncStream, turn: Turn, watch: Watch) -> bool:
        """To the end; whether there is an answer as a whole."""
        loop = self._network.loop
        ends = None if turn.timeout_s is None else loop.now + turn.timeout_s
        if ends is not None:
            loop.call_at(ends, self._may_end, watch)
        self._counts["requests"] += 1
        try:
            await stream.completion()
            self._counts["answers"] += 1
            watch.whole()
        except Superseded as error:
            if not watch.times_over:
                self._violated(f"{watch.name}: taken over by nobody: {error}")
            self._counts["taken over"] += 1
            return False
        except (Unavailable, Overloaded) as error:
            if ends is None or loop.now < ends:
                self._violated(f"{watch.name}: given up at {loop.now:.3f}: {error}")
            return False
        except IdsNeeded:
            self._counts["ids needed"] += 1
            raise
        except OutriderError as error:
            self._violated(f"{watch.name}: {type(error).__name__}: {error}")
            return False
        finally:
            if ends is not None and loop.now > ends + SLACK_S:
                self._violated(f"{watch.name}: ended {loop.now - ends:.1f} s after its deadline")
        return True

    @staticmethod
    def _may_end(watch: Watch) -> None:
        watch.may_be_cancelled = True

    async def cancel(self, watch: Watch, orchestrators: Sequence[int]) -> None:
        """Asks one orchestrator after the other until one answers."""
        watch.may_be_cancelled = True
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

    async def stale(self, watch: Watch, turn: Turn) -> None:
        """Somebody who fell behind speaks to every verifier under an epoch of long ago."""
        key = common_pb2.SessionKey(tenant="default", session=self._session)
        epoch = max(1, (watch.epoch >> 1))
        if not watch.epoch:
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
    """Names what the client has by number and hash."""
    for have in start.have:
        if ids := list(have.ids):
            have.CopyFrom(generation_pb2.TokenIds(count=len(ids), prefix_hash=hash_of([*prompt, *ids])))
