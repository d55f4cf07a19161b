"""Classes of hostile calls of the gRPC front: large messages, bytes that are none, streams and frames."""

import asyncio
import os
from collections.abc import AsyncIterator, Sequence

import grpc.aio

from benchmarks.hostile.attacked_services import Ports
from benchmarks.hostile.inputs import CLOSED, HELD, UNLIMITED, HostileClass, Input, call, outcome_of
from outrider.v1 import generation_pb2 as pb

GENERATE = "Generation/Generate"
UNARY = ("Generation/Cancel", "Generation/Explain", "Generation/ListModels")
HELD_S = 4.0
MB = 1 << 20
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04\x00" + bytes(4)


def generate(start: pb.GenerateStart) -> Input:
    """A call of Generate with this request."""
    return call("orchestrator", GENERATE, pb.GenerateRequest(start=start).SerializeToString())


def start(**fields: object) -> pb.GenerateStart:
    """A small legal request with these fields."""
    made = pb.GenerateStart(max_tokens=1, **fields)  # type: ignore[arg-type]  # the message checks them
    if made.WhichOneof("prompt") is None:
        made.ids.ids.extend((5, 9))
    return made


def biases() -> Sequence[Input]:
    """30 MB of logit biases: distinct ids, one id, ids out of range."""
    distinct, beyond = start(), start()
    for id_ in range(1_800_000):
        distinct.sampling.logit_bias[id_] = 0.5
    for id_ in range(500_000):
        beyond.sampling.logit_bias[2**31 + id_] = 0.5
    once = start()
    once.sampling.logit_bias[7] = 0.5
    entry = once.sampling.SerializeToString()
    repeated = once.SerializeToString() + b"".join([_field(6, entry)] * 1_200_000)
    return [generate(distinct), generate(beyond), call("orchestrator", GENERATE, _field(1, repeated))]


def ids() -> Sequence[Input]:
    """Ids beyond what a context holds, in each field that has some."""
    stops, have, many, ended = start(), start(seed=1, session="s"), pb.GenerateStart(max_tokens=1), start()
    stops.sampling.stop_ids.extend(range(4_000_000))
    have.have.add().ids.extend([2**31] * 2_400_000)
    several = start(seed=1, session="s", n=2)
    for _ in range(1_000_000):
        several.have.add()
    many.ids.ids.extend([5] * 25_000_000)
    ended.ended.extend(range(5_000_000))
    wrong = pb.GenerateStart(max_tokens=1)
    wrong.ids.ids.extend([2**31] * 5_000_000)
    return [generate(each) for each in (stops, have, several, many, ended, wrong)]


def strings() -> Sequence[Input]:
    """Texts and names beyond their numbers and lengths."""
    stop, sources, corpora = start(stop=["s"] * 2_000_000), start(), start()
    sources.speculation.sources.extend(["drafter"] * 1_000_000)
    corpora.speculation.corpora.extend(f"c{number}" for number in range(1_000_000))
    prediction, schema, regex = start(), start(), start()
    prediction.speculation.prediction = "p" * 30 * MB
    schema.grammar.json_schema = '{"a":' * 2_000_000
    regex.grammar.regex = "(" * 10 * MB
    texts = [pb.GenerateStart(text=text) for text in ("a" * 30 * MB, " " * 2 * MB, "ab" * 50_000)]
    names = [start(session="s" * 10 * MB), start(tenant="t" * 10 * MB), start(model="m" * 10 * MB)]
    return [generate(each) for each in (stop, sources, corpora, prediction, schema, regex, *texts, *names)]


def junk() -> Sequence[Input]:
    """Bytes that are no message, unknown fields, and messages within messages, on every method."""
    deep = b""
    for _ in range(300):
        deep = _field(1, deep)
    random, unknown = os.urandom(4096), _field(100, bytes(30 * MB))
    groups = b"\x0b" * 1_000_000
    several = [
        _field(101, b"x") * 3_000_000,
        b"\xff" * 100,
        random,
        deep,
        unknown,
        groups,
        b"\x0a\xff\xff\xff\x7f",
    ]
    made = [call("orchestrator", method, data) for method in (GENERATE, *UNARY) for data in several]
    return [*made, *[call("orchestrator", method, b"\xff" * 100) for method in (GENERATE, *UNARY)] * 50]


def streams() -> Sequence[Input]:
    """Calls without a message, with many messages, with large metadata, without a key, left at once."""
    small = pb.GenerateRequest(start=start()).SerializeToString()
    large = pb.GenerateRequest(start=start(text="x" * 20 * MB)).SerializeToString()
    metadata = [(f"x-{number}", "v" * 70) for number in range(100)]

    async def silent(ports: Ports) -> str:
        async def nothing() -> AsyncIterator[bytes]:
            await asyncio.sleep(HELD_S)
            for _ in ():
                yield b""

        async with grpc.aio.insecure_channel(ports.addresses["orchestrator"], options=UNLIMITED) as channel:
            return await outcome_of(channel, ports, GENERATE, nothing())

    async def keyless(ports: Ports) -> str:
        return await call("orchestrator", GENERATE, large)(Ports(ports.http, ports.addresses, "wrong"))

    async def left(ports: Ports) -> str:
        async with grpc.aio.insecure_channel(ports.addresses["orchestrator"]) as channel:
            for _ in range(100):
                made: grpc.aio.StreamStreamMultiCallable[bytes, bytes]
                made = channel.stream_stream(f"/outrider.v1.{GENERATE}")
                made(metadata=(("authorization", f"Bearer {ports.key}"),)).cancel()
                await asyncio.sleep(0)
        return HELD

    return [
        call("orchestrator", GENERATE, *[small] * 2_000),
        call("orchestrator", GENERATE, small, *[large] * 5),
        call("orchestrator", GENERATE, small, metadata=metadata),
        call("orchestrator", GENERATE),
        *[keyless] * 8,
        *[left] * 4,
        *[silent] * 60,
    ]


def large_at_once() -> Sequence[Input]:
    """Messages just below the largest that gRPC takes, many at a time: with the key, and with a wrong one."""
    texts = [generate(start(text="x" * (size * MB - 1_000))) for size in (1, 4, 8)]
    cancel = pb.CancelRequest(session="s" * (4 * MB - 1_000)).SerializeToString()
    large = call("orchestrator", GENERATE, cancel)

    async def keyless(ports: Ports) -> str:
        return await large(Ports(ports.http, ports.addresses, "wrong"))

    return [*texts * 32, *[call("orchestrator", "Generation/Cancel", cancel), keyless] * 32]


def frames() -> Sequence[Input]:
    """HTTP/2 below gRPC: floods of settings, pings and resets, and streams that are opened and left."""

    def raw(data: bytes, read: bool = True) -> Input:
        async def send(ports: Ports) -> str:
            reader, writer = await asyncio.open_connection(*ports.host_and_port("orchestrator"))
            try:
                for at in range(0, len(data), 1 << 16):
                    writer.write(data[at : at + (1 << 16)])
                    async with asyncio.timeout(HELD_S):
                        await writer.drain()
                async with asyncio.timeout(0.5):
                    while read and await reader.read(1 << 16):
                        pass
            except (TimeoutError, ConnectionError):
                return CLOSED
            finally:
                writer.close()
            return HELD

        return send

    opened = b"".join(_headers(number) + _frame(3, 0, number, b"\0\0\0\x08") for number in range(1, 4_001, 2))
    kept = b"".join(_headers(number) for number in range(1, 2_001, 2))
    floods = [
        _frame(6, 0, 0, bytes(8)) * 50_000,
        _frame(4, 0, 0, b"") * 50_000,
        _frame(8, 0, 0, b"\0\0\0\1") * 50_000,
    ]
    floods += [opened, kept, _frame(9, 4, 1, bytes(100)) * 10, os.urandom(1 << 20)]
    return [raw(PREFACE + data, read) for data in floods for read in (True, False)]


def _field(number: int, data: bytes) -> bytes:
    """One length-delimited field of a message."""
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    made = bytearray()
    while value > 127:
        made.append(value & 127 | 128)
        value >>= 7
    return bytes([*made, value])


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def _headers(stream: int) -> bytes:
    """The frame that opens a call of Generate."""
    path = f"/outrider.v1.{GENERATE}".encode()
    block = b"\x83\x86\x04" + bytes([len(path)]) + path + b"\x01\x01x\x0f\x10\x10application/grpc"
    return _frame(1, 4, stream, block + b"\x00\x02te\x08trailers")


CLASSES = [
    HostileClass("grpc biases", biases),
    HostileClass("grpc ids", ids),
    HostileClass("grpc strings", strings),
    HostileClass("grpc junk", junk),
    HostileClass("grpc streams", streams, at_once=32),
    HostileClass("grpc large at once", large_at_once, at_once=64),
    HostileClass("grpc frames", frames),
]
