"""gRPC messages that differ from a legal one in a field: its size, nesting, wire type or repetition.

Messages are put together from bytes, by the descriptors' field numbers: what no library would write can be
written, too.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from google.protobuf.descriptor import Descriptor
from hypothesis import strategies as st

from outrider.v1 import explain_pb2
from outrider.v1 import generation_pb2 as pb

LARGEST = 1 << 18
"""Most bytes of one field."""
COUNTS = (*(1,) * 8, *(2, 3, 16, 17, 64, 256, 257) * 2, 4097, 50_000)
"""How often a field is repeated; the limits of fields are among them, or next to them. Large counts are rare:
they cost as much as many inputs."""
UNKNOWN = (12, 90, 16_000, 2**29 - 1)
"""Numbers of fields that no message has."""
GENERATE = "Generation/Generate"
REQUESTS: dict[str, Descriptor] = {
    GENERATE: pb.GenerateRequest.DESCRIPTOR,
    "Generation/Cancel": pb.CancelRequest.DESCRIPTOR,
    "Generation/Explain": explain_pb2.ExplainRequest.DESCRIPTOR,
    "Generation/ListModels": pb.ListModelsRequest.DESCRIPTOR,
}
_START = pb.GenerateStart(max_tokens=2, seed=1)
_START.ids.ids.extend((5, 9))
LEGAL: dict[str, bytes] = {
    GENERATE: pb.GenerateRequest(start=_START).SerializeToString(),
    "Generation/Cancel": pb.CancelRequest(session="fuzzed").SerializeToString(),
    "Generation/Explain": b"",
    "Generation/ListModels": b"",
}
"""The smallest requests that are answered, before which a field is put or after."""


class Place(NamedTuple):
    """A field of a request, at any depth."""

    path: tuple[int, ...]
    """Numbers of the messages that hold the field, the outermost first."""
    number: int

    def around(self, data: bytes) -> bytes:
        """The bytes of the field, within the messages that hold it."""
        for number in reversed(self.path):
            data = tag(number, 2) + varint(len(data)) + data
        return data


def places(message: Descriptor, path: tuple[int, ...] = ()) -> Iterator[Place]:
    """Every field of a request and of the messages in it, and some that it does not have."""
    for field in message.fields:
        yield Place(path, field.number)
        if field.message_type is not None:
            yield from places(field.message_type, (*path, field.number))
    yield from (Place(path, number) for number in UNKNOWN)


def varint(value: int, length: int = 0) -> bytes:
    """A number as protobuf writes it, or in more bytes than it needs."""
    made = bytearray()
    while value > 127 or len(made) + 1 < length:
        made.append(value & 127 | 128)
        value >>= 7
    return bytes([*made, value])


def tag(number: int, wire_type: int) -> bytes:
    """What stands before a field's value."""
    return varint(number << 3 | wire_type)


NUMBERS = tuple(sorted({2**power + more for power in (0, 1, 4, 8, 31, 32, 53, 63) for more in (-1, 0, 1)}))
TEXTS: tuple[bytes, ...] = (
    b"",
    b"x",
    b"a" * 129,
    b"a" * 5000,
    b"\n",
    b"\0",
    b"\xff\xfe",
    b"\xed\xa0\x80",
    b"../x",
    "é\u0301".encode(),
)
TEXTS += (b"{}", b'{"type":"object"}', b"(a|b)*", b"(" * 300, b"lookup", b"drafter", b"fuzzed", b"canary")


def _payloads() -> st.SearchStrategy[tuple[int, bytes]]:
    """A wire type, and bytes that follow a tag of this type."""
    numbers = st.sampled_from(NUMBERS) | st.integers(0, 2**64 - 1)
    packed = st.builds(
        lambda number, count: varint(number) * count,
        numbers,
        st.sampled_from((0, 1, 3, 17, 64, 256, 2047, 20_000)),
    )
    ids = st.builds(lambda data: b"\x0a" + varint(len(data)) + data, packed)
    texts = (
        st.sampled_from(TEXTS) | st.binary(max_size=40) | st.text(max_size=20).map(str.encode) | packed | ids
    )
    return st.one_of(
        numbers.map(lambda number: (0, varint(number))),
        st.just((0, varint(1, 11))),
        st.binary(min_size=8, max_size=8).map(lambda data: (1, data)),
        texts.map(lambda data: (2, varint(len(data)) + data)),
        st.builds(lambda length, data: (2, varint(length) + data), numbers, st.binary(max_size=8)),
        st.binary(min_size=4, max_size=4).map(lambda data: (5, data)),
        st.integers(0, 2000).map(lambda depth: (3, b"\x0b" * depth + b"\x0c" * depth)),
        st.sampled_from([(4, b""), (6, b""), (7, b"\0" * 8), (2, b""), (1, b"\0"), (0, b"\x80" * 12)]),
    )


class Value(NamedTuple):
    """A field's value on the wire, and how often the field is repeated."""

    wire_type: int
    data: bytes
    times: int

    def at(self, place: Place) -> bytes:
        """The bytes of a request's field with this value."""
        one = tag(place.number, self.wire_type) + self.data
        return place.around(one * max(1, min(self.times, LARGEST // len(one))))


@st.composite
def values(draw: st.DrawFn) -> Value:
    """A value of any wire type, repeated."""
    wire_type, data = draw(_payloads())
    return Value(wire_type, data, draw(st.sampled_from(COUNTS)))


def requests(method: str, at: Sequence[Place], put: Sequence[Value], first: bool) -> list[bytes]:
    """A legal request for each place and value, with the value there: in front of all fields, or behind."""
    legal = LEGAL[method]
    made = [value.at(place) for place in at for value in put]
    return [field + legal if first else legal + field for field in made]
