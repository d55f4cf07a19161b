"""Owns the processes that read bodies: starts them, hands each one body at a time, kills what hangs.

The loop only moves bytes here, in pieces, and validates the few fields that come back.
"""

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.front.http.bodies.fair_queue import FairQueue
from orchestrator.front.http.bodies.frames import (
    ANOTHER,
    LENGTH,
    BodyTask,
    read_from_parts,
    refused_by,
    task_head,
)
from orchestrator.front.http.bodies.reading import ReadBody
from orchestrator.front.http.field_faults import FieldRefused
from orchestrator.front.http.spawning import KillableProcess
from speculative.errors import Overloaded, Unavailable

READERS = 2
WAITING = 64
"""Bodies that may wait for a process."""
WALL_S = 60.0
"""Seconds after which a process is killed: the machine is too busy to give it its seconds of a core."""
QUEUE_S = 20.0
"""Seconds that a body may wait for a process."""
WARM_AFTER_S = 2.0
"""Seconds after the start at which a first process is started, unless a body came before."""
PIECE = 1 << 18
"""Bytes that are written at once."""
LONG_TEXT = 1 << 20
"""Bytes of a text that is decoded in a thread."""
MOST_HEAD = 1 << 20
MODULE = "orchestrator.front.http.bodies.reader"


class ReaderEnded(Exception):
    """A process ended before it handed its body back: it was killed."""


@dataclass(eq=False, slots=True)
class _Waiting:
    task: BodyTask
    data: bytearray
    result: asyncio.Future[ReadBody]


class ReaderProcess(KillableProcess):
    """One process that reads bodies, one at a time."""

    MODULE = MODULE
    usable = True
    """Whether the process takes another body."""

    async def read(self, task: BodyTask, data: bytearray) -> ReadBody:
        """The body, read. Raises FieldRefused, and ReaderEnded where the process ended."""
        self.usable = False
        fields, parts = b"", list[bytes | str]()
        try:
            await self._send(task, data)
            head = await self._head()
            refused = refused_by(head)
            if refused is None:
                fields = await self._reader.readexactly(head["fields"])
                parts = [await self._part(is_text, size) for is_text, size in head["parts"]]
            self.usable = await self._reader.readexactly(1) == ANOTHER
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise ReaderEnded from error
        if refused is not None:
            raise refused
        return read_from_parts(task, head, fields, parts)

    async def _send(self, task: BodyTask, data: bytearray) -> None:
        self._writer.write(task_head(task))
        for start in range(0, len(data), PIECE):
            self._writer.write(bytes(data[start : start + PIECE]))
            await self._writer.drain()

    async def _head(self) -> Mapping[str, Any]:
        (size,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        if size > MOST_HEAD:
            raise ReaderEnded
        head = json.loads(await self._reader.readexactly(size))
        assert isinstance(head, dict)
        return head

    async def _part(self, is_text: bool, size: int) -> bytes | str:
        data = await self._reader.readexactly(size)
        if not is_text:
            return data
        return data.decode() if size <= LONG_TEXT else await asyncio.to_thread(data.decode)


class ReaderPool:
    """Reads bodies in processes; clients take turns, and none of them has all processes.

    Args:
        count: the most processes.
        observe: called with the seconds that a body took, from its place in the queue until it was read.
        ended: called for each process that ended or was ended, apart from those that `stop` ends.
    """

    def __init__(
        self,
        count: int = READERS,
        observe: Callable[[float], None] = lambda seconds: None,
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        self._count = count
        self._observe = observe
        self._ended = ended
        self._queue: FairQueue[_Waiting] = FairQueue(WAITING, max(1, count - 1))
        self._ready: list[ReaderProcess] = []
        self._working: set[asyncio.Task[None]] = set()
        self._warming: asyncio.Task[None] | None = None
        self._stopped = False

    @property
    def waiting(self) -> int:
        """How many bodies wait for a process; from any thread."""
        return len(self._queue)

    def start(self) -> None:
        """Start a first process soon, so that few bodies wait for one, and the start of others goes first."""
        self._warming = asyncio.create_task(self._warm(), name="start a process that reads bodies")

    async def stop(self) -> None:
        """End all processes, and refuse what they read."""
        self._stopped = True
        tasks = [*self._working, *([self._warming] if self._warming else ())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for waiting in self._queue.empty():
            _end(waiting)
        for process in self._ready:
            await process.close()
        self._ready.clear()

    async def read(self, task: BodyTask, data: bytearray, owner: str) -> ReadBody:
        """The body, read by a process. Raises FieldRefused, and Overloaded where no process is free in time.

        Args:
            owner: whose turn the body takes.
        """
        began = time.perf_counter()
        waiting = _Waiting(task, data, asyncio.get_running_loop().create_future())
        self._queue.put(owner, waiting)
        self._dispatch()
        try:
            async with asyncio.timeout(QUEUE_S + WALL_S):
                return await waiting.result
        except TimeoutError:
            raise Overloaded("this orchestrator is too busy to read a large body", 1.0) from None
        finally:
            self._queue.discard(owner, waiting)  # a client that leaves takes its body along
            self._observe(time.perf_counter() - began)

    def _dispatch(self) -> None:
        while len(self._working) < self._count and not self._stopped and (taken := self._queue.take()):
            task = asyncio.create_task(self._work(*taken), name="read a body")
            self._working.add(task)
            task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._working.discard(task)
        self._dispatch()

    async def _warm(self) -> None:
        await asyncio.sleep(WARM_AFTER_S)
        if not self._ready and not self._working:
            self._ready.append(await ReaderProcess.start())

    async def _work(self, owner: str, waiting: _Waiting) -> None:
        """Read one body, unless nobody waits for it any more."""
        try:
            if not waiting.result.done():
                read = await self._read(waiting)
                if not waiting.result.done():
                    waiting.result.set_result(read)
        except asyncio.CancelledError:
            _end(waiting)
            raise
        except Exception as error:
            if not waiting.result.done():
                waiting.result.set_exception(error)
        finally:
            self._queue.done(owner)

    async def _read(self, waiting: _Waiting) -> ReadBody:
        try:
            async with asyncio.timeout(WALL_S):
                process = await self._idle_process()
                try:
                    return await self._read_by(process, waiting)
                except ReaderEnded:
                    if waiting.result.done() or process.used_up_cpu_time:
                        raise
                    # One kill may have another cause; after a second one, the body is to blame.
                    return await self._read_by(await ReaderProcess.start(), waiting)
        except TimeoutError:
            raise Overloaded("this orchestrator is too busy to read a large body", 1.0) from None
        except ReaderEnded:
            raise FieldRefused(
                None, "the body takes too much time or memory to read; make it smaller"
            ) from None

    async def _read_by(self, process: ReaderProcess, waiting: _Waiting) -> ReadBody:
        try:
            return await process.read(waiting.task, waiting.data)
        finally:
            if process.usable:
                self._ready.append(process)
            else:
                await self._clear_away(process)

    async def _idle_process(self) -> ReaderProcess:
        """A process that waits for a body; a new one where none does."""
        while self._ready:
            process = self._ready.pop()
            if process.is_running:
                return process
            await self._clear_away(process)
        return await ReaderProcess.start()

    async def _clear_away(self, process: ReaderProcess) -> None:
        if not self._stopped:
            self._ended()
        await process.close()


def _end(waiting: _Waiting) -> None:
    if not waiting.result.done():
        waiting.result.set_exception(Unavailable("this orchestrator is stopping; try another, or try again"))
