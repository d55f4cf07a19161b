"""The process that reads bodies: one after another, each within bounds of processor time and memory.

It is started with its end of a socket as standard input, and ends when the other end closes. It has none of
the parent's environment and opens no file. Where Python can be interrupted, a body that takes too long is
refused and the process lives on; elsewhere the kernel ends the process.
"""

import gc
import os
import resource
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedRWPair
from types import FrameType
from typing import NoReturn

from orchestrator.front.http.bodies.bounds import BodyKind
from orchestrator.front.http.bodies.frames import (
    ANOTHER,
    LAST,
    LENGTH,
    BodyTask,
    answer,
    refusal,
    task_from_head,
)
from orchestrator.front.http.bodies.reading import Render, parse_json, read_value
from orchestrator.front.http.bodies.templates import render_conversation
from orchestrator.front.http.chat.conversation import ChatConversation
from orchestrator.front.http.chat.planning import Rendered
from orchestrator.front.http.field_faults import FieldRefused

PARSE_S = 4.0
"""Processor time for everything but the template, in seconds; 32 MiB of token ids take half of it."""
RENDER_S = 2.0
"""Processor time for a template, in seconds."""
GRACE_S = 2
"""Seconds of processor time after which the kernel ends a process that does not notice that time is up."""
MEMORY_MIB = 1_024
"""Address space of the process, in MiB."""
KEPT_MIB = 256
"""Memory in MiB: a process that has had more is replaced after its body."""
NICE = 5
"""How far the process steps back behind the event loop, where both want the same core."""
_MIB = 1 << 20


class _OutOfTime(BaseException):
    """The time for a step is up. Not an Exception: a template's failure is one, and is told otherwise."""


def main() -> None:
    """Reads bodies until the parent closes the socket."""
    _bound()
    with socket.socket(fileno=os.dup(0)) as connection, connection.makefile("rwb") as stream:
        while head := _read_head(stream):
            task = task_from_head(head)
            data = stream.read(task.size)
            if len(data) < task.size:
                return
            for part in _answer(task, data):
                stream.write(part)
            grown = _most_resident_mib() > KEPT_MIB
            stream.write(LAST if grown else ANOTHER)
            stream.flush()
            if grown:
                return


def _bound() -> None:
    os.nice(NICE)
    signal.signal(signal.SIGPROF, _out_of_time)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, for the parent
    for what, most in (
        (resource.RLIMIT_AS, MEMORY_MIB * _MIB),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (most, most))
    gc.freeze()


def _read_head(stream: BufferedRWPair) -> bytes:
    length = stream.read(LENGTH.size)
    return stream.read(LENGTH.unpack(length)[0]) if len(length) == LENGTH.size else b""


def _answer(task: BodyTask, data: bytes) -> Iterator[bytes]:
    """The answer in parts; a refusal where a bound is met."""
    try:
        with _within(PARSE_S, "the body"):
            value = parse_json(data)
            read = read_value(task.kind, value, task.bounds, _renderer(task))
            parts = list(answer(value, read))
    except FieldRefused as error:
        parts = [refusal(error)]
    except MemoryError:
        gc.collect()
        parts = [
            refusal(FieldRefused(_field(task.kind), f"the body takes more than {MEMORY_MIB} MiB to read"))
        ]
    yield from parts


def _renderer(task: BodyTask) -> Render:
    """Renders conversations by the template of the model that a body names, or of the only model."""

    def render(model: str | None, conversation: ChatConversation) -> Rendered:
        only = next(iter(task.templates)) if len(task.templates) == 1 else ""
        name = model or only
        if name not in task.templates:
            return Rendered("")  # which model it may be is for the admission to tell
        template = task.templates[name]
        if template is None:
            raise FieldRefused(
                "messages", f"model {name!r} has no chat template: ask /v1/completions with a prompt"
            )
        with _within(RENDER_S, "the chat template cannot take these messages: it", "messages"):
            text = render_conversation(template.source, template.tokens, conversation)
            special = task.special.get(name, {})
            return Rendered(text, template.source, template.response, special, name in task.preambles)

    return render


@contextmanager
def _within(seconds: float, what: str, param: str | None = None) -> Iterator[None]:
    """Ends the code inside after this processor time. Raises FieldRefused then."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    until = int(used.ru_utime + used.ru_stime + seconds) + GRACE_S
    resource.setrlimit(resource.RLIMIT_CPU, (until, resource.RLIM_INFINITY))
    left, _ = signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    except _OutOfTime:
        why = f"{what} did not end within {seconds:g} s of processor time"
        raise FieldRefused(param, why) from None
    finally:
        signal.setitimer(signal.ITIMER_PROF, left)


def _out_of_time(number: int, frame: FrameType | None) -> NoReturn:
    raise _OutOfTime


def _field(kind: BodyKind) -> str:
    """The field whose size makes a body large."""
    match kind:
        case BodyKind.CHAT | BodyKind.TOKENIZE | BodyKind.MESSAGES | BodyKind.COUNT:
            return "messages"
        case BodyKind.RESPONSES:
            return "input"
        case BodyKind.COMPLETION:
            return "prompt"
        case BodyKind.DETOKENIZE:
            return "tokens"


def _most_resident_mib() -> int:
    """The most memory that the process has had since it began: much of it may never go back."""
    with open("/proc/self/status") as file:
        peak = next(line for line in file if line.startswith("VmHWM:"))
    return int(peak.split()[1]) // 1024


if __name__ == "__main__":
    main()
