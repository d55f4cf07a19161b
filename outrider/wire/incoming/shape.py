"""Bounds of a message that are checked on its bytes, before protobuf makes objects of them.

What a message costs to parse depends on its fields, not on its bytes: 8 MiB may be one text, or four million
empty fields. Protobuf parses without a pause, so the fields are counted first, in a walk that stops at the
first field too many, and that pauses for other tasks of the thread.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from speculative.errors import InvalidRequest

SMALL_BYTES = 64 * 1024
"""Messages of at most this size are parsed as they are: in the worst case that takes some 0.7 ms."""
MOST_FIELDS = 4096
"""The most values, all nested messages together, that are no packed numbers, where a bound says no other."""
MOST_NUMBERS = 2 * 2**20
"""The most numbers in packed fields, all of them together: protobuf parses them in some 15 ms."""
PIECE_BYTES = 256 * 1024
"""The least size of a piece that is parsed by itself, in bytes."""
BATCH_BYTES = 512 * 1024
"""Bytes after which a sender ends a message that speaks of many sessions; the rest goes into further ones. A
single session may need a larger message."""
BATCH_ENTRIES = 1024
"""Sessions, cursors or refusals of one such message. Receivers take at least four times as many."""
FIELDS_PER_PAUSE = 2048
"""Fields between two pauses of the walk: some 2 ms."""

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_LEAF, _NESTED = 0, 1
_CONTINUED = bytes(range(0x80, 0x100))
_FIXED_SIZES = {_FIXED64: 8, _FIXED32: 4}
_SIZED = {
    FieldDescriptor.TYPE_DOUBLE: 8,
    FieldDescriptor.TYPE_FIXED64: 8,
    FieldDescriptor.TYPE_SFIXED64: 8,
    FieldDescriptor.TYPE_FLOAT: 4,
    FieldDescriptor.TYPE_FIXED32: 4,
    FieldDescriptor.TYPE_SFIXED32: 4,
}
_UNPACKED = frozenset({FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_GROUP})


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one message may hold at most."""

    most_bytes: int = SMALL_BYTES
    most_fields: int = MOST_FIELDS
    """Values that are no packed numbers, those of nested messages included; an entry of a map is one."""
    most_numbers: int = MOST_NUMBERS
    """Numbers in packed fields."""
    because: str = ""
    """What sets `most_bytes`, for the refusal: "a context of 512 tokens needs no more"."""


class NotWireFormat(ValueError):
    """The bytes cannot be a protobuf message."""


def check_size(data: bytes, bounds: Bounds) -> None:
    """Raises InvalidRequest where the message has more bytes than it may have."""
    if len(data) > bounds.most_bytes:
        why = f": {bounds.because}" if bounds.because else ""
        raise InvalidRequest(
            f"the message is too large: {len(data)} bytes; at most {bounds.most_bytes} are read here{why}"
        )


def walk(
    data: bytes, descriptor: Descriptor, bounds: Bounds, cuts: list[int] | None = None
) -> Iterator[None]:
    """Counts the fields of a message; yields now and then, so that its caller can pause.

    Args:
        cuts: gets places between two outermost fields, some PIECE_BYTES apart: protobuf may parse the pieces
            between these places one after the other, into one message.

    Raises InvalidRequest at the first field or number too many, and NotWireFormat for bytes that are no
    message (of groups, which proto3 does not have, likewise).
    """
    counts: Counter[str] = Counter()
    fields = numbers = at = last_cut = 0
    open_messages = [(_layout(descriptor), len(data))]
    while open_messages:
        layout, end = open_messages[-1]
        if cuts is not None and len(open_messages) == 1 and at - last_cut >= PIECE_BYTES:
            cuts.append(last_cut := at)
        if at >= end:
            open_messages.pop()
            continue
        tag, at = _varint(data, at, end)
        fields += 1
        name, kind, size = layout.fields.get(tag >> 3, _UNKNOWN)
        counts[name] += 1
        if fields > bounds.most_fields:
            raise _too_many_fields(counts, bounds.most_fields)
        if not fields % FIELDS_PER_PAUSE:
            yield
        wire = tag & 7
        if wire == _VARINT:
            _, at = _varint(data, at, end)
            continue
        if wire == _BYTES:
            length, at = _varint(data, at, end)
            if kind == _NESTED and at + length <= end:
                open_messages.append((layout.nested[tag >> 3], at + length))
                continue
            if size:
                numbers += _numbers(data, at, min(end, at + length), size)
                if numbers > bounds.most_numbers:
                    raise InvalidRequest(
                        f"the message has {numbers} numbers up to field {name}; at most "
                        f"{bounds.most_numbers} are read in one message here"
                    )
        elif wire in _FIXED_SIZES:
            length = _FIXED_SIZES[wire]
        else:
            raise NotWireFormat
        at += length
        if at > end:
            raise NotWireFormat


class _Layout:
    """The fields of one message type, by number: name, kind, and the bytes of a packed number (1: varint)."""

    def __init__(self, descriptor: Descriptor) -> None:
        self.fields: dict[int, tuple[str, int, int]] = {}
        self.nested: dict[int, _Layout] = {}
        for field in descriptor.fields:
            inner, size = field.message_type, 0
            kind = _LEAF
            if inner is not None and not inner.GetOptions().map_entry:
                kind = _NESTED
                self.nested[field.number] = _layout(inner)
            elif inner is None and field.is_repeated and field.type not in _UNPACKED:
                size = _SIZED.get(field.type, 1)
            self.fields[field.number] = (field.name, kind, size)


_UNKNOWN = ("that this contract does not have", _LEAF, 0)


@lru_cache(maxsize=256)
def _layout(descriptor: Descriptor) -> _Layout:
    return _Layout(descriptor)


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """A varint and the place behind it."""
    if at >= end:
        raise NotWireFormat
    byte = data[at]
    if byte < 0x80:
        return byte, at + 1
    value, shift = byte & 0x7F, 7
    for place in range(at + 1, min(end, at + 10)):
        byte = data[place]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place + 1
        shift += 7
    raise NotWireFormat


def _numbers(data: bytes, start: int, end: int, size: int) -> int:
    """How many numbers a packed field holds: a varint ends with its only byte below 128."""
    if end <= start:
        return 0
    if size > 1:
        return (end - start) // size
    return len(data[start:end].translate(None, _CONTINUED))


def _too_many_fields(counts: Counter[str], most: int) -> InvalidRequest:
    (name, count), *_ = counts.most_common(1)
    return InvalidRequest(
        f"the message has more than {most} values ({count} of them in field {name}); send fewer, and numbers "
        "of a repeated field packed, as proto3 does"
    )
