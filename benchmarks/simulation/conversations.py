"""The behaviour of users: they send turn after turn, cancel, leave, come back, or send a request twice."""

import asyncio
import copy
from collections.abc import Callable, Sequence

from benchmarks.simulation.client import SimulatedClient
from benchmarks.simulation.plan import Turn
from benchmarks.simulation.request_checker import RequestChecker
from outrider.client.async_client import AsyncStream
from speculative.errors import IdsNeeded

CANCELS_BY_S = 2.0
"""Seconds that a request may still go on after an answered Cancel and after the last fault."""


class Conversation:
    """One session's turns.

    Args:
        clients: creates a client by the name of its process.
        faults_over: when the last fault was over, on the loop's clock; infinite while faults go on. Until
            then a cancelled request may have to wait for a verifier, which alone ends it. None where a fault
            may make the services forget a Cancel.
    """

    def __init__(
        self,
        name: str,
        clients: Callable[[str], SimulatedClient],
        turns: Sequence[Turn],
        faults_over: Callable[[], float] | None,
        violated: Callable[[str], None],
    ) -> None:
        self.name = name
        self._clients = clients
        self._client = clients(f"client {name}")
        self._turns = turns
        self.golden: dict[int, list[tuple[int, ...]]] = {}
        """The golden ids of every request so far, by choice."""
        self._faults_over = faults_over
        self._violated = violated

    def start(self, after_s: float) -> asyncio.Task[None]:
        """Starts the conversation `after_s` seconds from now."""
        return self._client.process.spawn(self._run(after_s))

    async def _run(self, after_s: float) -> None:
        await asyncio.sleep(after_s)
        said: list[int] = []
        for number, turn in enumerate(self._turns):
            said += turn.new_ids
            answer = await self._turn(f"{self.name}/{number}", said, turn)
            if answer is None:
                return
            said += answer
            await asyncio.sleep(turn.pause_s)

    async def _turn(self, name: str, prompt: list[int], turn: Turn) -> list[int] | None:
        client, loop = self._client, asyncio.get_running_loop()
        checker, request = client.checker(name, prompt, turn), client.request(prompt, turn)
        for choice, (ids, _) in enumerate(checker.golden):
            self.golden.setdefault(choice, []).append(ids)
        checker.times_over = turn.act in {"rival", "twice"}
        stream = client.stream(request, turn, checker, turn.first)
        reading = asyncio.ensure_future(client.read(stream, turn, checker))
        rival = None
        if turn.act != "nothing":
            await asyncio.wait((reading,), timeout=turn.act_after_s)
        match turn.act:
            case "cancel":
                client.cancelled_at = None
                await client.cancel(checker, (1 - turn.first, turn.first))
            case "stale":
                await client.send_stale(checker, turn)
            case "rival":
                rival = self._rival(f"{name}'", prompt, turn)
            case "sleep":
                client.sleep(turn.asleep_s, checker)
            case "vanish":
                client.vanish(turn.pause_s)
                await asyncio.sleep(0)  # never returns: this task is the client's
            case "twice" if not reading.done() and not checker.has_all_ends:
                rival = self._twin(f"{name}''", prompt, turn, checker, stream)
            case "leave" | "return" if not reading.done() and not checker.has_all_ends:
                await _leave(stream, reading)
                if turn.act == "leave":
                    return None
                await asyncio.sleep(turn.pause_s)
                stream = client.stream(request, turn, checker, turn.first, stream._builder, turn.by_hash)
                reading = asyncio.ensure_future(client.read(stream, turn, checker))
        try:
            answered = await reading
        except IdsNeeded:
            again = client.stream(request, turn, checker, turn.first, stream._builder)
            answered = await client.read(again, turn, checker)
        if turn.act == "cancel" and client.cancelled_at is not None and self._faults_over is not None:
            latest = max(self._faults_over(), client.cancelled_at) + CANCELS_BY_S
            if loop.time() > latest:
                self._violated(f"{name}: went on until {loop.time():.3f} after a Cancel that was answered")
        if rival is not None and not (await rival) and not answered and turn.timeout_s is None:
            self._violated(f"{name}: asked twice at once, and neither was answered")
        return checker.ids[0] if answered else None

    def _rival(self, name: str, prompt: list[int], turn: Turn) -> asyncio.Task[bool]:
        """Sends the same request from another process to another orchestrator."""
        client = self._clients(f"client {name}")
        checker = client.checker(name, prompt, turn)
        checker.times_over = True
        stream = client.process.run(
            client.stream, client.request(prompt, turn), turn, checker, 1 - turn.first
        )
        reading: asyncio.Task[bool] = client.process.spawn(client.read(stream, turn, checker))
        return reading

    def _twin(
        self, name: str, prompt: list[int], turn: Turn, read: RequestChecker, stream: AsyncStream
    ) -> asyncio.Task[bool]:
        """Breaks the stream, and resumes it a second time beside the first."""
        client = self._client
        checker = client.checker(name, prompt, turn)
        checker.times_over = True
        checker.continues(read)
        client.lose_connection(turn.pause_s)
        before = copy.deepcopy(stream._builder)
        again = client.stream(client.request(prompt, turn), turn, checker, turn.seed % 2, before)
        return client.process.spawn(client.read(again, turn, checker))


async def _leave(stream: AsyncStream, reading: asyncio.Future[bool]) -> None:
    """Leaves a stream as a user who closes the window."""
    reading.cancel()
    stream.close()
    await asyncio.wait((reading,))
