"""A retrieval service over real gRPC, in this process or one of its own, and what can be called of it."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from outrider.runtime.children import ServiceProcess
from outrider.runtime.metrics import Metrics
from outrider.runtime.serve import Service, ServiceContext
from outrider.tokens import TokenTable
from outrider.v1 import common_pb2, draft_source_pb2, draft_source_pb2_grpc, retrieval_pb2, retrieval_pb2_grpc
from outrider.wire.channel import open_channel, server_options
from retrieval_service.service import build
from retrieval_service.settings import RetrievalSettings
from speculative.hashing import prefix_hash
from tests.in_time import PATIENCE_MS

LINE = "for index, value in enumerate(values):\n    print(index, value)\n"
Code = grpc.StatusCode


class Live:
    """A service, and what a verifier and an operator can call of it."""

    def __init__(
        self,
        address: str,
        channel: grpc.aio.Channel,
        tokens: TokenTable,
        metrics: Metrics | None = None,
        pid: int = 0,
        service: Service | None = None,
    ) -> None:
        self.address = address
        self.retrieval: Any = retrieval_pb2_grpc.RetrievalStub(channel)
        self.source: Any = draft_source_pb2_grpc.DraftSourceStub(channel)
        self.tokens = tokens
        self.metrics = metrics
        self.pid = pid
        self.service = service

    async def build(self, name: str, *texts: str, tenant: str = "", public: bool = True) -> Any:
        key = retrieval_pb2.CorpusName(name=name, tenant=tenant, public=public)
        messages = [retrieval_pb2.BuildCorpusRequest(start=key)]
        messages += [retrieval_pb2.BuildCorpusRequest(text=text) for text in texts]
        return await self.retrieval.BuildCorpus(iter(messages), timeout=100)

    async def names(self, tenant: str = "") -> list[str]:
        said = await self.retrieval.ListCorpora(retrieval_pb2.ListCorporaRequest(tenant=tenant), timeout=100)
        return [corpus.name.name for corpus in said.corpora]

    async def stats(self) -> Any:
        return await self.retrieval.Stats(retrieval_pb2.StatsRequest(), timeout=100)

    @asynccontextmanager
    async def attached(self) -> AsyncIterator["Attached"]:
        call = self.source.Attach()
        try:
            yield Attached(call, self.tokens)
        finally:
            call.cancel()


class Attached:
    """The verifier's end of one Attach stream."""

    def __init__(self, call: Any, tokens: TokenTable) -> None:
        self.call = call
        self.tokens = tokens
        self.ids: dict[int, list[int]] = {}

    async def follow(self, tokens: Sequence[int], alias: int = 1, tenant: str = "", **given: Any) -> None:
        self.ids[alias] = list(tokens)
        values: dict[str, Any] = {
            "alias": alias,
            "key": common_pb2.SessionKey(tenant=tenant, session=f"s{alias}"),
            "epoch": 5,
            "tokenizer_digest": self.tokens.digest,
            "ids": tokens,
            "prompt_length": len(tokens),
            "limit": 500,
            "sampling": common_pb2.Sampling(temperature=0),
            "node_limit": 32,
            "vocabulary_size": 96,
            "sources": ["corpus", "past", "dense"],
            "learn": True,
        }
        follow = draft_source_pb2.Follow(**(values | given))
        await self.call.write(draft_source_pb2.AttachRequest(follow=[follow]))

    async def commit(self, *fresh: int, alias: int = 1, end: bool = False) -> None:
        ids = self.ids[alias]
        progress = draft_source_pb2.Progress(
            alias=alias, position=len(ids), ids=fresh, prefix_hash=prefix_hash([*ids, *fresh])
        )
        ids.extend(fresh)
        await self.call.write(draft_source_pb2.AttachRequest(progress=[progress], end=[alias] * end))

    async def read(self) -> Any:
        async with asyncio.timeout(60):
            return await self.call.read()

    async def drafts(self) -> dict[str, list[int]]:
        """Drafted ids of the next message, by the source name of each draft."""
        message = await self.read()
        assert not message.refusals
        sources = message.sources or bytes(len(message.drafts))
        names = ("corpus", "past", "dense")
        return {names[k]: list(draft.ids) for k, draft in zip(sources, message.drafts, strict=True)}


@asynccontextmanager
async def serving(model: Path, folder: Path | None = None, **settings: Any) -> AsyncIterator[Live]:
    parsed = RetrievalSettings(tokenizer=str(model), folder="" if folder is None else str(folder), **settings)
    metrics = Metrics("retrieval")
    server = grpc.aio.server(options=server_options())
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    failures: list[BaseException] = []
    service = await build(ServiceContext(parsed, address, metrics, failures.append))
    service.register(server)
    await server.start()
    tokens = TokenTable.from_json((model / "tokenizer.json").read_text())
    async with AsyncExitStack() as stack:
        stack.push_async_callback(server.stop, 0)
        stack.push_async_callback(service.stop, 5.0)
        channel = await stack.enter_async_context(open_channel(address))
        await service.start()
        yield Live(address, channel, tokens, metrics, service=service)
    assert not failures


@asynccontextmanager
async def apart(model: Path, *flags: str) -> AsyncIterator[Live]:
    """A service as a process: FAISS and torch, which made the model, do not go together in one."""
    process = ServiceProcess.start("retrieval", "retrieval_service", ["--tokenizer", str(model), *flags])
    try:
        await asyncio.to_thread(process.wait_ready, 250.0)
        tokens = TokenTable.from_json((model / "tokenizer.json").read_text())
        async with open_channel(process.address, patience_ms=PATIENCE_MS) as channel:
            yield Live(process.address, channel, tokens, pid=process.pid)
    finally:
        assert process.stop(60.0) == 0


async def refused(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return error.value


async def refused_amid(live: Live, method: str, requests: Iterable[Any]) -> Any:
    """The refusal of a call that writes on.

    Where a refusal meets a write, calls of grpc.aio raise "Internal error from Core" in its place; blocking
    ones do not.
    """

    def call() -> Any:
        with grpc.insecure_channel(live.address) as channel, pytest.raises(grpc.RpcError) as error:
            getattr(retrieval_pb2_grpc.RetrievalStub(channel), method)(iter(requests), timeout=100)
        return error.value

    return await asyncio.to_thread(call)
