"""A verifier without a model that commits tokens at a given rate, to measure the orchestrator before it.

A benchmark starts it; its first line is its address, and it ends with its stdin:

    python -m benchmarks.http.fake_verifier TOKENIZER EVERY_S TOKENS

TOKENIZER is a tokenizer.json. Every session gets TOKENS tokens each EVERY_S seconds. The first come after a
share of EVERY_S that differs from session to session. With EVERY_S 0 a session gets tokens as fast as its
reader takes them. Without sessions the reader gets a beat now and then: thousands of beats that wait in the
connection would delay the next session's tokens.
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio

from benchmarks.shared.standin_server import serve_until_stdin_ends
from outrider.tokens import TokenTable
from outrider.v1 import common_pb2, explain_pb2
from outrider.v1 import verifier_pb2 as pb
from outrider.v1.verifier_pb2_grpc import VerifierServicer, add_VerifierServicer_to_server
from outrider.wire.channel import server_options
from outrider.wire.codec import SessionKey, key_from_wire
from outrider.wire.incoming.request_fields import REQUEST_FIELDS

MAX_LENGTH = 1 << 20
BEAT_S = 0.1
TEXT = "def add(left, right):\n    return left + right\n\n\nfor value in values:\n    print(value)\n"


@dataclass(slots=True)
class FakeSession:
    """How many tokens a session has, of how many, and when it gets more."""

    prompt: int
    length: int
    limit: int
    due: float


class FakeVerifier(VerifierServicer):
    """Serves the Verifier contract without decoding anything."""

    def __init__(self, table: TokenTable, every_s: float, tokens: int) -> None:
        self._table = table
        self._every_s = every_s
        self._tokens = tokens
        self._text_ids = table.encode(TEXT)
        self._sessions: dict[SessionKey, FakeSession] = {}

    async def Describe(self, request: Any, context: Any) -> pb.VerifierDescription:
        return pb.VerifierDescription(
            model="fake",
            max_length=MAX_LENGTH,
            vocabulary_size=self._table.size,
            tokenizer_digest=self._table.digest,
            local_sources=["lookup"],
            node_limit=16,
            max_sessions=1 << 16,
            numerics="fake",
            request_fields=REQUEST_FIELDS,
        )

    async def Explain(self, request: Any, context: Any) -> explain_pb2.ExplainResponse:
        """Knows no session's rounds."""
        return explain_pb2.ExplainResponse()

    async def Tokenizer(self, request: Any, context: Any) -> AsyncIterator[pb.TokenizerChunk]:
        data = self._table.to_json().encode()
        for start in range(0, len(data), 1 << 20):
            yield pb.TokenizerChunk(data=data[start : start + (1 << 20)])

    async def Open(self, request: pb.OpenRequest, context: Any) -> pb.OpenResponse:
        key = key_from_wire(request.key)
        share = hash(key) % 1024 / 1024
        due = time.monotonic() + self._every_s * share
        self._sessions[key] = FakeSession(request.prompt_length, len(request.ids), request.limit, due)
        return pb.OpenResponse(source_names=["lookup"])

    async def Cancel(self, request: pb.VerifierCancelRequest, context: Any) -> pb.VerifierCancelResponse:
        found = self._sessions.pop(key_from_wire(request.key), None) is not None
        return pb.VerifierCancelResponse(found=found)

    async def Watch(
        self, requests: AsyncIterator[pb.WatchRequest], context: Any
    ) -> AsyncIterator[pb.WatchResponse]:
        cursors: dict[int, pb.Cursor] = {}
        added = asyncio.Event()
        reading = asyncio.create_task(_read(requests, cursors, added))
        step = 0
        try:
            while True:
                if cursors:
                    await asyncio.sleep(min(self._every_s, BEAT_S))
                else:
                    with suppress(TimeoutError):
                        await asyncio.wait_for(added.wait(), BEAT_S)
                added.clear()
                step += 1
                response = pb.WatchResponse(beat=pb.Beat(step=step))
                now = time.monotonic()
                for alias, cursor in list(cursors.items()):
                    if (committed := self._committed(cursor, now)) is not None:
                        response.committed.append(committed)
                        if committed.finished:
                            cursors.pop(alias, None)
                yield response
        finally:
            reading.cancel()

    def _committed(self, cursor: pb.Cursor, now: float) -> pb.Committed | None:
        key = key_from_wire(cursor.key)
        session = self._sessions.get(key)
        if session is None:
            return pb.Committed(alias=cursor.alias, code=5, message="no such session")
        if now < session.due:
            return None
        session.due += self._every_s
        start, session.length = session.length, min(session.limit, session.length + self._tokens)
        places = range(start, session.length)
        committed = pb.Committed(
            alias=cursor.alias,
            position=start,
            ids=[self._text_ids[place % len(self._text_ids)] for place in places],
            token_sources=bytes(place % 2 for place in places),
        )
        if session.length == session.limit:
            made = session.length - session.prompt
            committed.finished = common_pb2.FINISH_REASON_LENGTH
            committed.usage.CopyFrom(common_pb2.Usage(completion_tokens=made, rounds=made, admitted=made))
            del self._sessions[key]
        return committed


async def _read(
    requests: AsyncIterator[pb.WatchRequest], cursors: dict[int, pb.Cursor], added: asyncio.Event
) -> None:
    async for request in requests:
        cursors.update({cursor.alias: cursor for cursor in request.add})
        added.set()
        for alias in request.drop:
            cursors.pop(alias, None)


async def serve(table: TokenTable, every_s: float, tokens: int) -> None:
    """Serves a fake verifier until stdin ends."""
    server = grpc.aio.server(options=server_options())
    add_VerifierServicer_to_server(FakeVerifier(table, every_s, tokens), server)
    await serve_until_stdin_ends(server, grace_s=0)


if __name__ == "__main__":
    token_table = TokenTable.from_json(Path(sys.argv[1]).read_text())
    asyncio.run(serve(token_table, float(sys.argv[2]), int(sys.argv[3])))
