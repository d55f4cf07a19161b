"""Classes of hostile calls inside: at the registry, at a verifier's port and at sources' ports."""

import asyncio
import os
from collections.abc import AsyncIterator, Sequence

import grpc.aio

from benchmarks.hostile.attacked_services import Ports
from benchmarks.hostile.inputs import HELD, UNLIMITED, HostileClass, Input, call, outcome_of
from outrider.v1 import draft_source_pb2, registry_pb2, retrieval_pb2, verifier_pb2
from outrider.v1.common_pb2 import SessionKey

MB = 1 << 20
HELD_S = 4.0
JUNK = (b"\xff" * 100, b"\x0a\xff\xff\xff\x7f", b"\xaa\x06\x01x" * 2_000_000)
KEY = SessionKey(tenant="attacker", session="s")
VERIFIER = ("Describe", "Tokenizer", "Open", "Watch", "Cancel", "Explain")
SOURCE = ("Describe", "Attach")
CORPORA = ("ListCorpora", "BuildCorpus", "LoadCorpus", "UnloadCorpus")
RETRIEVAL = (*CORPORA, "AddDocuments", "RemoveDocuments", "ExportPast", "Forget", "Stats")


def endless(role: str, method: str, message: bytes, pause_s: float = 0.0) -> Input:
    """A call that sends one message again and again for HELD_S seconds."""

    async def send(ports: Ports) -> str:
        async def messages() -> AsyncIterator[bytes]:
            loop = asyncio.get_running_loop()
            ends = loop.time() + HELD_S
            while loop.time() < ends:
                yield message
                await asyncio.sleep(pause_s)

        async with grpc.aio.insecure_channel(ports.addresses[role], options=UNLIMITED) as channel:
            try:
                async with asyncio.timeout(2 * HELD_S):
                    return await outcome_of(channel, ports, method, messages())
            except TimeoutError:  # such a stream has no end of its own
                return HELD

    return send


def sent(role: str, method: str, *messages: bytes) -> Input:
    """A call that sends these messages; one that is still open after HELD_S seconds is left."""

    async def send(ports: Ports) -> str:
        try:
            async with asyncio.timeout(HELD_S):
                return await call(role, method, *messages)(ports)
        except TimeoutError:
            return HELD

    return send


def registry() -> Sequence[Input]:
    """Announcements that are junk, huge, or of hundreds of workers that do not exist."""
    method, drafter = "Registry/Announce", registry_pb2.WORKER_ROLE_DRAFTER
    request = registry_pb2.AnnounceRequest
    huge = [
        request(role=drafter, address="a" * 20 * MB),
        request(role=drafter, address="x:1", model="m" * 20 * MB),
    ]
    huge += [request(role=99, address="127.0.0.1:1"), request(role=drafter, address="\n" * 1_000)]  # type: ignore[arg-type]
    many = [request(role=drafter, address=f"127.0.0.1:{port}") for port in range(1, 400)]
    messages = [*JUNK, *(each.SerializeToString() for each in (*huge, *many))]
    return [sent("registry", method, message) for message in messages]


def verifier_junk() -> Sequence[Input]:
    """Bytes that are no message, at every method of a verifier."""
    junk = [sent("verifier", f"Verifier/{method}", data) for method in VERIFIER for data in JUNK]
    return [*junk, *[call("verifier", "Verifier/Cancel", b"\xff")] * 200]


def verifier_opens() -> Sequence[Input]:
    """Sessions far too large, as an authenticated and mad orchestrator opens them."""
    opens = [verifier_pb2.OpenRequest(key=KEY, epoch=1) for _ in range(6)]
    opens[0].ids.extend([5] * 20_000_000)
    opens[1].ids.extend([2**31] * 5_000_000)
    opens[2].sampling.stop_ids.extend(range(4_000_000))
    opens[3].prediction.extend([5] * 20_000_000)
    opens[4].stop.extend(["s"] * 2_000_000)
    for number in range(300_000):
        opens[5].sources.add(name=f"s{number}", address="127.0.0.1:1")
    return [call("verifier", "Verifier/Open", each.SerializeToString()) for each in opens]


def verifier_watches() -> Sequence[Input]:
    """Streams with too many cursors, with junk behind a cursor, and without an end."""
    cursors = verifier_pb2.WatchRequest()
    for alias in range(400_000):
        cursors.add.add(alias=alias, key=KEY, epoch=1)
    drops = verifier_pb2.WatchRequest(drop=range(5_000_000))
    cursor = verifier_pb2.WatchRequest(add=[verifier_pb2.Cursor(alias=1, key=KEY, epoch=1)])
    return [
        sent("verifier", "Verifier/Watch", cursors.SerializeToString()),
        sent("verifier", "Verifier/Watch", drops.SerializeToString()),
        sent("verifier", "Verifier/Watch", cursor.SerializeToString(), b"\xff" * 100),
        *[endless("verifier", "Verifier/Watch", cursor.SerializeToString())] * 4,
        *[endless("verifier", "Verifier/Watch", b"")] * 4,
    ]


def verifier_many() -> Sequence[Input]:
    """Streams that each stay below what one may send, and together do not."""
    cursor = verifier_pb2.WatchRequest(add=[verifier_pb2.Cursor(alias=1, key=KEY, epoch=1)])
    return [endless("verifier", "Verifier/Watch", cursor.SerializeToString(), 0.002)] * 48


def sources() -> Sequence[Input]:
    """What an authenticated and mad verifier sends to a drafter and to a retrieval worker."""
    follow = draft_source_pb2.Follow(alias=1, key=KEY, epoch=1, prompt_length=1, limit=2_000, node_limit=16)
    huge = draft_source_pb2.AttachRequest(follow=[follow])
    huge.follow[0].ids.extend([5] * 20_000_000)
    many = draft_source_pb2.AttachRequest()
    for alias in range(100_000):
        many.follow.add(alias=alias, key=KEY, epoch=1)
    progress = draft_source_pb2.AttachRequest(
        progress=[draft_source_pb2.Progress(alias=7, position=1, ids=[5])]
    )
    wide = draft_source_pb2.AttachRequest(progress=[progress.progress[0]] * 500_000)
    ends = draft_source_pb2.AttachRequest(end=range(5_000_000))
    made: list[Input] = []
    for role in ("drafter", "retrieval"):
        made += [sent(role, f"DraftSource/{method}", data) for method in SOURCE for data in JUNK]
        large = (huge, many, wide, ends)
        made += [sent(role, "DraftSource/Attach", each.SerializeToString()) for each in large]
        made += [endless(role, "DraftSource/Attach", progress.SerializeToString())] * 4
    return made


def corpora() -> Sequence[Input]:
    """What an authenticated and mad operator sends to a retrieval worker."""
    name = retrieval_pb2.CorpusName(name="c", tenant="attacker")
    begin = retrieval_pb2.BuildCorpusRequest(start=name).SerializeToString()
    text = retrieval_pb2.BuildCorpusRequest(text="x" * 10 * MB).SerializeToString()
    numbers = retrieval_pb2.BuildCorpusRequest()
    numbers.ids.ids.extend([2**31] * 5_000_000)
    document = retrieval_pb2.AddDocumentsRequest(tenant="attacker")
    document.document.name, document.document.text = "r", "x" * 20 * MB
    names = retrieval_pb2.RemoveDocumentsRequest(tenant="attacker", names=["n"] * 2_000_000)
    return [
        *(sent("retrieval", f"Retrieval/{method}", data) for method in RETRIEVAL for data in JUNK),
        sent("retrieval", "Retrieval/BuildCorpus", begin, text, text),
        sent("retrieval", "Retrieval/BuildCorpus", begin, numbers.SerializeToString()),
        sent("retrieval", "Retrieval/BuildCorpus", *[begin] * 1_000),
        sent("retrieval", "Retrieval/AddDocuments", document.SerializeToString()),
        sent("retrieval", "Retrieval/RemoveDocuments", names.SerializeToString()),
        endless("retrieval", "Retrieval/AddDocuments", os.urandom(100)),
    ]


CLASSES = [
    HostileClass("registry", registry, at_once=16),
    HostileClass("verifier: junk", verifier_junk),
    HostileClass("verifier: opens", verifier_opens),
    HostileClass("verifier: watches", verifier_watches),
    HostileClass("verifier: many streams", verifier_many, at_once=48),
    HostileClass("source ports", sources),
    HostileClass("retrieval port", corpora),
]
