"""Takes bodies in: receives them within their bounds, and reads them here or in a process."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from starlette.requests import Request

from orchestrator.fleet.target_model import TargetModel
from orchestrator.front.http.bodies.arriving import receive_body
from orchestrator.front.http.bodies.bounds import BodyBounds, BodyKind
from orchestrator.front.http.bodies.frames import BodyTask
from orchestrator.front.http.bodies.memory import BodyMemory, HeldMemory
from orchestrator.front.http.bodies.pool import ReaderPool
from orchestrator.front.http.bodies.reading import ReadBody, needs_process, parse_json, read_value
from orchestrator.front.http.chat.conversation import ChatConversation
from orchestrator.front.http.chat.planning import Rendered
from orchestrator.front.http.templated.known_templates import response_template
from orchestrator.front.http.templated.special_marks import can_reason_before_format, special_marks
from orchestrator.front.message_bounds import most_text_bytes
from outrider.tokens import ChatTemplate

LEAST_MEMORY = 1 << 27
"""Bytes of memory for bodies that arrive, at least."""


class BodyIntake:
    """Receives and reads the bodies of one front.

    Args:
        targets: the models that are served now. Raises Unavailable where there is none.
        prompts: the most prompts of a body.
        most_bytes: the most bytes of a body, whatever is served.
        pool: reads large bodies.
    """

    def __init__(
        self, targets: Callable[[], Sequence[TargetModel]], prompts: int, most_bytes: int, pool: ReaderPool
    ) -> None:
        self._targets = targets
        self._prompts = prompts
        self._most_bytes = most_bytes
        self._memory = BodyMemory(max(LEAST_MEMORY, 4 * most_bytes))
        self._pool = pool

    def start(self) -> None:
        """Begin to start the first process that reads bodies."""
        self._pool.start()

    async def stop(self) -> None:
        """End the processes that read bodies."""
        await self._pool.stop()

    def held(self, owner: str) -> AbstractContextManager[HeldMemory]:
        """Memory for one body of this owner."""
        return self._memory.held(owner)

    async def receive(self, kind: BodyKind, request: Request, memory: HeldMemory) -> bytearray:
        """The body's bytes. Raises what receive_body raises, and Unavailable where no model is served."""
        most = body_bounds(self._targets(), self._prompts, self._most_bytes).largest(kind)
        return await receive_body(request.scope, request.receive, most, memory)

    async def read(self, kind: BodyKind, data: bytearray, owner: str) -> ReadBody:
        """The body, read. Raises FieldRefused, Overloaded, and Unavailable where no model is served."""
        targets = self._targets()
        bounds = body_bounds(targets, self._prompts, self._most_bytes)
        if not needs_process(kind, len(data)):
            return read_value(kind, parse_json(data), bounds, _no_conversation)
        templates = {target.name: _template(target) for target in targets}
        special = {target.name: special_marks(target) for target in targets}
        preambles = frozenset(target.name for target in targets if can_reason_before_format(target))
        task = BodyTask(kind, len(data), bounds, templates, special, preambles)
        return await self._pool.read(task, data, owner)


def body_bounds(targets: Sequence[TargetModel], prompts: int, most_bytes: int) -> BodyBounds:
    """The bounds of bodies for these models, of which there is at least one."""
    return BodyBounds(
        context=max(target.max_length for target in targets),
        text_bytes=max(map(most_text_bytes, targets)),
        prompts=prompts,
        most_bytes=most_bytes,
    )


def _template(target: TargetModel) -> ChatTemplate | None:
    """The model's chat template, with the response template by which its answers are parsed."""
    if target.chat is None or target.tokens is None:
        return None
    return replace(target.chat, response=response_template(target.chat))


def _no_conversation(model: str | None, conversation: ChatConversation) -> Rendered:
    raise AssertionError("conversations are rendered in a process")
