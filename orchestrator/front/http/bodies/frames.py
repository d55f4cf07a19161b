"""Messages between the front and the processes that read bodies, as bytes. Pure.

A message is a head of JSON and the bytes that the head describes. Nothing is unpickled: a process that reads
what clients send, and runs templates, is not to be trusted with more than text and numbers.
"""

import json
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from struct import Struct
from typing import Any

from orchestrator.front.http.bodies.bounds import BodyBounds, BodyKind
from orchestrator.front.http.bodies.reading import ReadBody, read_fields, small_fields
from orchestrator.front.http.chat.families import ThoughtMarks
from orchestrator.front.http.chat.plan import ChatPlan, Thought
from orchestrator.front.http.field_faults import FieldRefused
from outrider.tokens import ChatTemplate

LENGTH = Struct("<I")
"""The length of the head in bytes, before the head."""
ANOTHER, LAST = b"\1", b"\0"
"""The byte after an answer: whether the process takes another body, or ends."""
MOST_SAID = 2_000
"""The most characters of a refusal."""


@dataclass(frozen=True, slots=True)
class BodyTask:
    """What is to be read, beside the body's own bytes."""

    kind: BodyKind
    size: int
    """Bytes of the body."""
    bounds: BodyBounds
    templates: Mapping[str, ChatTemplate | None]
    """Chat template of each served model, by the model's name; None: it has none."""
    special: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """By the model's name, the ids of the marks of its answers that are special tokens."""
    preambles: Collection[str] = frozenset()
    """Names of the models whose reasoning can precede an answer in a client's format."""


def task_head(task: BodyTask) -> bytes:
    """The head of the message that asks for a body to be read; the body's bytes follow."""
    return _framed(
        {"kind": task.kind, "size": task.size, "bounds": asdict(task.bounds)}
        | {"templates": {name: held and astuple(held) for name, held in task.templates.items()}}
        | {"special": {name: dict(ids) for name, ids in task.special.items()}}
        | {"preambles": list(task.preambles)}
    )


def task_from_head(data: bytes) -> BodyTask:
    """The task that a head describes."""
    head = json.loads(data)
    templates = {
        name: None if held is None else ChatTemplate(str(held[0]), dict(held[1]), str(held[2]))
        for name, held in head["templates"].items()
    }
    bounds, preambles = BodyBounds(**head["bounds"]), frozenset(head["preambles"])
    return BodyTask(BodyKind(head["kind"]), head["size"], bounds, templates, head["special"], preambles)


def answer(value: object, read: ReadBody) -> Iterator[bytes]:
    """The message that hands back a body, in parts."""
    texts = [*read.prompts, *read.references, read.prediction, read.suffix]
    packed = [text.encode() if isinstance(text, str) else text.tobytes() for text in texts]
    parts = [[isinstance(text, str), len(data)] for text, data in zip(texts, packed, strict=True)]
    fields = small_fields(value if read.body is None else read.body)
    plan = None if read.chat is None else asdict(read.chat)
    counted = {"fields": len(fields), "parts": parts, "references": len(read.references)}
    yield _framed(counted | {"rendered": read.rendered, "chat": plan})
    yield fields
    yield from packed


def refusal(error: FieldRefused) -> bytes:
    """The message that refuses a body."""
    return _framed({"refused": str(error)[:MOST_SAID], "param": error.param})


def refused_by(head: Mapping[str, Any]) -> FieldRefused | None:
    """The refusal that a head holds; None: the body was read."""
    if "refused" not in head:
        return None
    param = head["param"]
    return FieldRefused(None if param is None else str(param), str(head["refused"]))


def read_from_parts(
    task: BodyTask, head: Mapping[str, Any], fields: bytes, parts: Sequence[bytes | str]
) -> ReadBody:
    """The body that an answer hands back.

    Args:
        parts: what follows the fields; texts are decoded.
    """
    *texts, prediction, suffix = (part if isinstance(part, str) else _ids(part) for part in parts)
    begin = len(texts) - head["references"]
    prompts, references = texts[:begin], tuple(text for text in texts[begin:] if isinstance(text, str))
    assert isinstance(prediction, str)
    assert isinstance(suffix, str)
    asked = read_fields(task.kind, fields)
    plan = head["chat"]
    chat = None
    if plan is not None:
        kinds = {"thought": Thought(plan["thought"]), "marks": ThoughtMarks(*plan["marks"])}
        chat = ChatPlan(**plan | kinds | {"allowed": tuple(plan["allowed"])})
    return ReadBody(asked, tuple(prompts), prediction, references, suffix, bool(head["rendered"]), chat)


def _ids(data: bytes) -> "array[int]":
    ids = array("I")
    ids.frombytes(data)
    return ids


def _framed(head: Mapping[str, Any]) -> bytes:
    data = json.dumps(head).encode()
    return LENGTH.pack(len(data)) + data
