"""A draft source on a real socket that behaves as a test wants."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

import grpc.aio

from outrider.v1 import draft_source_pb2, draft_source_pb2_grpc
from outrider.wire.channel import server_options
from speculative.hashing import extend, prefix_hash

Draft = draft_source_pb2.Draft


@dataclass
class View:
    """A session as the source follows it."""

    follow: draft_source_pb2.Follow
    ids: list[int]

    def draft(
        self,
        tokens: Sequence[int],
        parents: Sequence[int] | None = None,
        *,
        base: Sequence[int] | None = None,
        **others: Any,
    ) -> Draft:
        """A well-formed draft below `base`, by default all committed ids; `others` replace its fields."""
        below = self.ids if base is None else base
        fields: dict[str, Any] = {
            "alias": self.follow.alias,
            "epoch": self.follow.epoch,
            "base": len(below),
            "prefix_hash": prefix_hash(below),
            "ids": tokens,
            "parents": b"" if parents is None else bytes(parent + 1 for parent in parents),
            "survival": bytes([200] * len(tokens)),
        }
        return Draft(**fields | others)


Behaviour = Callable[[View], list[Draft]]


def silent(view: View) -> list[Draft]:
    return []


class FakeSource(draft_source_pb2_grpc.DraftSourceServicer):
    """Follows sessions, and answers each message as `behave` says."""

    def __init__(self, behave: Behaviour = silent) -> None:
        self.behave = behave
        self.refuse = ""
        self.streams = 0
        self.messages = 0
        self.follows: list[draft_source_pb2.Follow] = []
        self.ended = 0
        self.past: list[list[int]] = []
        """What was known of sessions when they ended."""
        self.names: Callable[[list[Draft]], bytes] = lambda drafts: b""
        """Of which of the session's names each draft is."""
        self.least: list[int] = []
        """The least survival in each message."""
        self.views: dict[int, View] = {}
        self.address = ""
        self.weights_version = 0
        """What it says of its weights."""
        self.tops = 0
        """How many of the target's likeliest ids it wants."""
        self.learns: bool | None = None
        """What it says of whether it learns; None: nothing."""
        self.progress: list[draft_source_pb2.Progress] = []

    async def Describe(self, request: Any, context: Any) -> draft_source_pb2.SourceDescription:
        return draft_source_pb2.SourceDescription(
            name="drafter", model="fake", tops=self.tops, learns=self.learns
        )

    async def Attach(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        self.streams += 1
        self.views = {}
        async for request in request_iterator:
            self.messages += 1
            self.least.append(request.least_survival)
            touched = self._take(request)
            if self.refuse and request.follow:
                refusals = [
                    draft_source_pb2.Refusal(alias=follow.alias, message=self.refuse)
                    for follow in request.follow
                ]
                yield draft_source_pb2.AttachResponse(refusals=refusals)
                continue
            drafts = [draft for alias in touched for draft in self.behave(self.views[alias])]
            if drafts:
                yield draft_source_pb2.AttachResponse(
                    drafts=drafts, sources=self.names(drafts), weights_version=self.weights_version
                )

    def _take(self, request: Any) -> list[int]:
        aliases = [progress.alias for progress in request.progress]
        self.progress += request.progress
        for progress in request.progress:
            view = self.views[progress.alias]
            assert progress.position == len(view.ids), "progress leaves no gap"
            view.ids.extend(progress.ids)
            assert progress.prefix_hash == prefix_hash(view.ids)
        for alias in request.end:
            self.past.append(self.views.pop(alias).ids)
            self.ended += 1
        for follow in request.follow:
            assert follow.alias not in self.views, "an alias is unique until it is ended"
            self.follows.append(follow)
            self.views[follow.alias] = View(follow, list(follow.ids))
            aliases.append(follow.alias)
        return [alias for alias in dict.fromkeys(aliases) if alias in self.views]


@dataclass
class Oracle:
    """Knows how every prompt goes on, and drafts trees in which wrong siblings stand beside the truth."""

    answers: dict[tuple[int, ...], list[int]]
    depth: int = 5
    siblings: int = 2
    late: int = 0
    """Drafts from a base so many ids behind."""
    chance: Random = field(default_factory=lambda: Random(0))

    def __call__(self, view: View) -> list[Draft]:
        prompt = tuple(view.follow.ids[: view.follow.prompt_length])
        whole = [*prompt, *self.answers[prompt]]
        base = max(len(prompt), len(view.ids) - self.late)
        ahead = whole[base : base + self.depth + self.late]
        if whole[:base] != view.ids[:base] or not ahead:
            return []
        tokens: list[int] = []
        parents: list[int] = []
        above = -1
        for token in ahead:
            wrong = {(token + offset + 1) % view.follow.vocabulary_size for offset in range(self.siblings)}
            family = [token, *wrong]
            self.chance.shuffle(family)
            below = len(tokens) + family.index(token)
            tokens += family
            parents += [above] * len(family)
            above = below
        return [view.draft(tokens, parents, base=view.ids[:base])]


@dataclass
class Garbage:
    """Drafts random trees: well-formed, and nearly always wrong."""

    chance: Random = field(default_factory=lambda: Random(1))

    def __call__(self, view: View) -> list[Draft]:
        width = view.follow.vocabulary_size
        count = self.chance.randrange(1, 12)
        tokens = [self.chance.randrange(width) for _ in range(count)]
        parents = [self.chance.randrange(-1, node) for node in range(count)]
        below = view.ids[: self.chance.randrange(1, len(view.ids) + 1)]
        drafted = [*view.ids, self.chance.randrange(width)]
        ahead = view.draft(
            tokens, parents, base=drafted, prefix_hash=extend(prefix_hash(view.ids), drafted[-1])
        )
        return [view.draft(tokens, parents), view.draft(tokens, parents, base=below), ahead]


@dataclass
class Running:
    """A fake source's server, which can be ended and started again on the same port."""

    source: FakeSource
    address: str = "127.0.0.1:0"
    window: int = 0
    """The bytes that a stream takes in unread; 0: what gRPC finds good, some megabytes."""
    _server: Any = None

    async def start(self) -> None:
        options = server_options()
        if self.window:
            options += [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", self.window)]
        self._server = grpc.aio.server(options=options)
        draft_source_pb2_grpc.add_DraftSourceServicer_to_server(self.source, self._server)
        port = self._server.add_insecure_port(self.address)
        self.address = f"127.0.0.1:{port}"
        await self._server.start()

    async def die(self) -> None:
        await self._server.stop(None)


@asynccontextmanager
async def running(source: FakeSource, window: int = 0) -> AsyncIterator[Running]:
    server = Running(source, window=window)
    await server.start()
    try:
        yield server
    finally:
        await server.die()
