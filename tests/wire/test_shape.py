"""Bounds that are checked on a message's bytes, before protobuf makes objects of them."""

import re
import time
from collections.abc import Callable

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from outrider.v1 import common_pb2, draft_source_pb2, generation_pb2, verifier_pb2
from outrider.wire.incoming.shape import Bounds, NotWireFormat, check_size, walk
from speculative.errors import InvalidRequest
from tests.in_time import in_time

START = generation_pb2.GenerateStart.DESCRIPTOR
REQUEST = generation_pb2.GenerateRequest.DESCRIPTOR


def walked(data: bytes, kind: type[Message], **most: int) -> int:
    """Pauses of a walk over all of a message."""
    return sum(1 for _ in walk(data, kind.DESCRIPTOR, Bounds(**most)))


def varint(number: int) -> bytes:
    out = b""
    while number > 127:
        out += bytes([number & 127 | 128])
        number >>= 7
    return out + bytes([number])


def field(number: int, body: bytes) -> bytes:
    """A length-delimited field."""
    return varint(number << 3 | 2) + varint(len(body)) + body


def ids(count: int) -> bytes:
    return generation_pb2.GenerateRequest(
        start=generation_pb2.GenerateStart(ids=generation_pb2.TokenIds(ids=[300] * count))
    ).SerializeToString()


def test_every_value_counts_once_also_in_nested_messages() -> None:
    message = generation_pb2.GenerateRequest(
        start=generation_pb2.GenerateStart(
            model="m",
            ids=generation_pb2.TokenIds(ids=[1, 2, 3]),
            stop=["a", "b"],
            sampling=common_pb2.Sampling(temperature=0.5, logit_bias={1: 1.0, 2: 2.0}),
        )
    ).SerializeToString()
    # start, model, ids and the numbers in it, two stops, sampling, its temperature and two entries.
    walked(message, generation_pb2.GenerateRequest, most_fields=10)
    with pytest.raises(InvalidRequest, match="more than 9 values"):
        walked(message, generation_pb2.GenerateRequest, most_fields=9)


def test_the_refusal_names_the_field_that_has_most_values() -> None:
    message = common_pb2.Sampling(logit_bias={id_: 1.0 for id_ in range(500)}).SerializeToString()
    with pytest.raises(InvalidRequest, match=r"more than 100 values \(101 of them in field logit_bias\)"):
        walked(message, common_pb2.Sampling, most_fields=100)


def test_numbers_of_packed_fields_are_counted_without_parsing_them() -> None:
    walked(ids(1000), generation_pb2.GenerateRequest, most_numbers=1000)
    with pytest.raises(InvalidRequest, match="1001 numbers up to field ids; at most 1000"):
        walked(ids(1001), generation_pb2.GenerateRequest, most_numbers=1000)


def test_numbers_of_several_packed_fields_add_up() -> None:
    have = [generation_pb2.TokenIds(ids=[1] * 600) for _ in range(2)]
    message = generation_pb2.GenerateStart(have=have).SerializeToString()
    with pytest.raises(InvalidRequest, match="1200 numbers up to field ids; at most 1000"):
        walked(message, generation_pb2.GenerateStart, most_numbers=1000)


def test_numbers_of_fixed_size_are_counted_by_their_size() -> None:
    token = common_pb2.TokenLogprob(top_logprobs=[0.5] * 8).SerializeToString()
    walked(token, common_pb2.TokenLogprob, most_numbers=8)
    with pytest.raises(InvalidRequest, match="8 numbers up to field top_logprobs"):
        walked(token, common_pb2.TokenLogprob, most_numbers=7)


def test_numbers_that_are_not_packed_count_as_values() -> None:
    unpacked = b"\x08\x05" * 200
    assert len(generation_pb2.TokenIds.FromString(unpacked).ids) == 200
    with pytest.raises(InvalidRequest, match=r"more than 100 values \(101 of them in field ids\).*packed"):
        walked(unpacked, generation_pb2.TokenIds, most_fields=100)


def test_fields_that_the_contract_does_not_have_count_as_values() -> None:
    unknown = (varint(100 << 3) + b"\x01") * 200
    with pytest.raises(InvalidRequest, match="101 of them in field that this contract does not have"):
        walked(unknown, generation_pb2.TokenIds, most_fields=100)


def test_the_walk_pauses_now_and_then() -> None:
    assert walked(b"\x08\x05" * 10_000, generation_pb2.TokenIds, most_fields=10_000) >= 4
    assert walked(ids(10_000), generation_pb2.GenerateRequest) == 0


@pytest.mark.parametrize(
    "junk",
    [
        b"\xff",
        b"\xff" * 64,
        b"\x0a",
        b"\x0a\x05abc",
        b"\x0a\xff\xff\xff\xff\x0f",
        b"\x0b\x0c",
        b"\x0d\x00\x00",
        b"\x09\x00",
        b"\x0f",
        field(1, field(6, b"\x42\x7f")),
        b"\x80" * 11 + b"\x01",
    ],
)
def test_bytes_that_are_no_message_end_the_walk(junk: bytes) -> None:
    with pytest.raises(NotWireFormat):
        walked(junk, generation_pb2.GenerateRequest)


@given(st.binary(max_size=200))
def test_any_bytes_are_walked_or_refused(data: bytes) -> None:
    for kind in (generation_pb2.GenerateRequest, verifier_pb2.OpenRequest, draft_source_pb2.AttachRequest):
        try:
            walked(data, kind)
        except NotWireFormat:
            continue


@given(st.lists(st.integers(0, 2**32 - 1), max_size=50), st.text(max_size=20), st.integers(0, 2**63))
def test_what_protobuf_writes_is_walked_to_its_end(numbers: list[int], text: str, seed: int) -> None:
    start = generation_pb2.GenerateStart(
        text=text,
        seed=seed,
        have=[generation_pb2.TokenIds(ids=numbers, count=3, prefix_hash=seed)] * 2,
        sampling=common_pb2.Sampling(stop_ids=numbers, logit_bias=dict.fromkeys(numbers, 0.5)),
    )
    data = generation_pb2.GenerateRequest(start=start).SerializeToString()
    walked(data, generation_pb2.GenerateRequest, most_numbers=3 * len(numbers))


def test_a_message_above_its_size_is_refused_with_both_sizes_and_the_reason() -> None:
    why = "the message is too large: 11 bytes; at most 10 are read here: a context of 4 tokens needs no more"
    with pytest.raises(InvalidRequest, match=re.escape(why)):
        check_size(b"x" * 11, Bounds(10, because="a context of 4 tokens needs no more"))
    check_size(b"x" * 10, Bounds(10))


def thread_ms(work: Callable[[], object]) -> float:
    """Processor time of the shortest of three runs, in milliseconds."""
    taken = []
    for _ in range(3):
        began = time.thread_time()
        work()
        taken.append(time.thread_time() - began)
    return 1000 * min(taken)


MADE_OF = {
    "empty stop strings": field(1, field(8, b"") * 4_000_000),
    "biases": field(1, field(6, field(8, b"\x08\x05") * 2_000_000)),
    "empty haves": field(1, field(16, b"") * 2_500_000),
    "unpacked ids": field(1, field(5, b"\x08\x05" * 4_000_000)),
    "starts": field(1, b"") * 4_000_000,
    "unknown fields": (varint(100 << 3) + b"\x01") * 2_500_000,
    "ids": field(1, field(5, field(1, b"\x05" * 8_000_000))),
}


@pytest.mark.parametrize("what", MADE_OF)
def test_eight_million_bytes_of_one_kind_are_refused_within_20_ms(what: str) -> None:
    def refuse() -> None:
        with pytest.raises(InvalidRequest):
            walked(MADE_OF[what], generation_pb2.GenerateRequest)

    in_time((took := thread_ms(refuse)) < 20, f"{took:.1f} ms")
