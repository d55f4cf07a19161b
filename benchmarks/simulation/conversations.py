"""What users do: ask turn after turn, cancel, leave, come back elsewhere, ask twice at once."""

import asyncio
from collections.abc import Callable, Sequence

from benchmarks.simulation.client import Client
from benchmarks.simulation.plan import Turn
from outrider.client.async_client import AsyncStream
from speculative.errors import IdsNeeded

CANCELS_BY_S = 2.0
"""How long after a Cancel that was answered, and after the last fault, a request may still go on."""


class Conversation:
    """One session's turns.

    Args:
        clients: makes a client by the name of its process.
        faults_over: when the last fault was over, on the loop's clock; infinite where it is not yet. Until
            then a cancelled request may have to wait for a verifier, which alone ends it. None: something may
            make the services forget a Cancel.
    """

    def __init__(
        self,
        name: str,
        clients: Callable[[str], Client],
        turns: Sequence[Turn],
        faults_over: Callable[[], float] | None,
        violated: Callable[[str], None],
    ) -> None:
        self.name = name
        self._clients = clients
        self._client = clients(f"client {name}")
        self._turns = turns
        self.golden: dict[int, list[tuple[int, ...]]] = {}
        """What each choice's requests so far are to give."""
        self._faults_over = faults_over
        self._violated = violated

    def start(self, after_s: float) -> asyncio.Task[None]:
        """The whole of it."""
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
        watch, request = client.watch(name, prompt, turn), client.request(prompt, turn)
        for choice, (ids, _) in enumerate(watch.golden):
            self.golden.setdefault(choice, []).append(ids)
        watch.times_over = turn.act == "rival"
        stream = client.stream(request, turn, watch, turn.first)
        reading = asyncio.ensure_future(client.read(stream, turn, watch))
        rival = None
        if turn.act != "nothing":
            await asyncio.wait((reading,), timeout=turn.act_after_s)
        match turn.act:
            case "cancel":
                client.cancelled_at = None
                await client.cancel(watch, (1 - turn.first, turn.first))
            case "stale":
                await client.stale(watch, turn)
            case "rival":
                rival = self._rival(f"{name}'", prompt, turn)
            case "leave" | "return" if not reading.done() and not watch.all_told:
                await _leave(stream, reading)
                if turn.act == "leave":
                    return None
                await asyncio.sleep(turn.pause_s)
                stream = client.stream(request, turn, watch, turn.first, stream, turn.by_hash)
                reading = asyncio.ensure_future(client.read(stream, turn, watch))
        try:
            answered = await reading
        except IdsNeeded:
            again = client.stream(request, turn, watch, turn.first, stream)
            answered = await client.read(again, turn, watch)
        if turn.act == "cancel" and client.cancelled_at is not None and self._faults_over is not None:
            latest = max(self._faults_over(), client.cancelled_at) + CANCELS_BY_S
            if loop.time() > latest:
                self._violated(f"{name}: went on until {loop.time():.3f} after a Cancel that was answered")
        if rival is not None and not (await rival) and not answered and turn.timeout_s is None:
            self._violated(f"{name}: asked twice at once, and neither was answered")
        return watch.ids[0] if answered else None

    def _rival(self, name: str, prompt: list[int], turn: Turn) -> asyncio.Task[bool]:
        """The same request from another process, at another orchestrator."""
        client = self._clients(f"client {name}")
        watch = client.watch(name, prompt, turn)
        watch.times_over = True
        stream = client.process.run(client.stream, client.request(prompt, turn), turn, watch, 1 - turn.first)
        reading: asyncio.Task[bool] = client.process.spawn(client.read(stream, turn, watch))
        return reading


async def _leave(stream: AsyncStream, reading: asyncio.Future[bool]) -> None:
    """As a user who closes the window."""
    reading.cancel()
    stream.close()
    await asyncio.wait((reading,))
