"""Owns the process that parses answers by response templates, and moves text there and back."""

import asyncio
import itertools
import json
import logging
import subprocess
from collections import deque
from contextlib import suppress
from dataclasses import replace
from typing import Any

from orchestrator.front.http.accumulator import Piece
from orchestrator.front.http.bodies.frames import LENGTH
from orchestrator.front.http.chat.output_parser import Parsed, ParsedCall
from orchestrator.front.http.spawning import KillableProcess

log = logging.getLogger(__name__)

MODULE = "orchestrator.front.http.templated.parser_worker"
WALL_S = 30.0
"""Seconds after which the process is killed: the machine is too busy to give it its seconds of a core."""
MOST_ANSWER = 1 << 26


class ParserEnded(Exception):
    """The process ended before it answered.

    Args:
        guilty: whether it was this message's turn.
    """

    def __init__(self, guilty: bool) -> None:
        super().__init__("the process that parses answers ended")
        self.guilty = guilty


class ParserProcess(KillableProcess):
    """One process that parses answers. Messages are answered in their order."""

    MODULE = MODULE

    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        super().__init__(process, reader, writer)
        self._asked: deque[asyncio.Future[dict[str, Any]]] = deque()
        self._reading = asyncio.create_task(self._read(), name="read parsed answers")

    @property
    def usable(self) -> bool:
        """Whether the process still answers."""
        return not self._reading.done()

    async def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """The answer to a message. Raises ParserEnded."""
        if not self.usable:
            raise ParserEnded(guilty=False)
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._asked.append(answer)
        self.tell(message)
        try:
            async with asyncio.timeout(WALL_S):
                with suppress(ConnectionError):  # the reading task tells
                    await self._writer.drain()
                return await answer
        except TimeoutError:
            self._process.kill()
            raise ParserEnded(guilty=True) from None

    def tell(self, message: dict[str, Any]) -> None:
        """Send a message."""
        data = json.dumps(message).encode()
        self._writer.write(LENGTH.pack(len(data)) + data)

    async def close(self) -> None:
        """Kill the process, and wait until it is gone."""
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        await super().close()

    async def _read(self) -> None:
        try:
            while True:
                (size,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
                if size > MOST_ANSWER:
                    return
                answer = json.loads(await self._reader.readexactly(size))
                waiting = self._asked.popleft()
                if not waiting.done():
                    waiting.set_result(answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            for place, waiting in enumerate(self._asked):
                if not waiting.done():
                    waiting.set_exception(ParserEnded(guilty=place == 0))
            self._asked.clear()


class ResponseParsers:
    """Parses answers by response templates, in one process that is started once an answer needs it."""

    def __init__(self) -> None:
        self._process: ParserProcess | None = None
        self._starting = asyncio.Lock()
        self._numbers = itertools.count()

    def parser(self, order: str) -> "ChoiceParser":
        """The parser of one choice, by what `parse_order` made."""
        return ChoiceParser(self, order, next(self._numbers))

    async def process(self) -> ParserProcess:
        """The process, started anew where it has ended. Raises OSError."""
        async with self._starting:
            if self._process is not None and not self._process.usable:
                log.warning("the process that parses answers ended and is started again")
                await self._process.close()
                self._process = None
            if self._process is None:
                self._process = await ParserProcess.start()
            return self._process

    async def stop(self) -> None:
        """End the process."""
        async with self._starting:
            if self._process is not None:
                await self._process.close()
                self._process = None


class ChoiceParser:
    """Parses the output of one choice: `feed` every piece in order, the last with `last`.

    Where the process ends, another process reads the choice from its beginning. A choice whose own text ended
    the process is content from then on.
    """

    def __init__(self, owner: ResponseParsers, order: str, number: int) -> None:
        self._owner = owner
        self._order = order
        self._number = number
        self._process: ParserProcess | None = None
        self._fed: list[str] = []
        self._given = 0, 0, 0
        """How much was returned so far: characters of content and reasoning, and calls."""
        self._held = 0
        """Characters at the end of the output that were not returned yet."""
        self._failed = False

    async def feed(self, text: str, *, last: bool) -> Parsed:
        """Parses a further piece of output; returns what the piece adds to the answer."""
        self._fed.append(text)
        while not self._failed:
            try:
                return await self._ask(text, last=last)
            except ParserEnded as error:
                self._failed = error.guilty
            except (OSError, ValueError) as error:
                log.warning("an answer cannot be parsed", extra={"fields": {"why": str(error)}})
                self._failed = True
        held, self._held = self._held, 0
        return Parsed("".join(self._fed)[-held - len(text) :] if held else text)

    def close(self) -> None:
        """Forget the choice."""
        if self._process is not None and self._process.usable:
            self._process.tell({"id": self._number})
        self._process = None

    async def _ask(self, text: str, *, last: bool) -> Parsed:
        """Raises ParserEnded, OSError, and ValueError where the template cannot be used."""
        process = await self._owner.process()
        anew = process is not self._process
        message = {"id": self._number, "text": "".join(self._fed) if anew else text, "last": last}
        self._process = process  # whoever stops waiting now has it forget the choice all the same
        answer = await process.ask(message | ({"order": self._order} if anew else {}))
        if "failed" in answer:
            raise ValueError(answer["failed"])
        calls = tuple(ParsedCall(**call) for call in answer["calls"])
        found = Parsed(answer["content"], answer["reasoning"], calls)
        content, reasoning, called = self._given
        if anew:  # the whole output was read again
            found = Parsed(found.content[content:], found.reasoning[reasoning:], found.calls[called:])
        self._given = (
            content + len(found.content),
            reasoning + len(found.reasoning),
            called + len(found.calls),
        )
        self._held = answer["held"]
        if last:
            self._process = None
        return found


class AnswerParsing:
    """Parses the choices of one answer, if a response template says how.

    Args:
        order: what `parse_order` made; empty: nothing is parsed here.
    """

    def __init__(self, owner: ResponseParsers, order: str) -> None:
        self._owner = owner
        self._order = order
        self._choices: dict[int, ChoiceParser] = {}

    async def parsed(self, piece: Piece) -> Piece:
        """The piece with what it adds to its choice's message."""
        if not self._order:
            return piece
        if piece.index not in self._choices:
            self._choices[piece.index] = self._owner.parser(self._order)
        found = await self._choices[piece.index].feed(piece.text, last=piece.finish is not None)
        return replace(piece, parsed=found)

    def close(self) -> None:
        """Forget choices that did not end."""
        for choice in self._choices.values():
            choice.close()
