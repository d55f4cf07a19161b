"""The service over real gRPC: drafts while corpora come and go, tenants apart, nothing lost at a restart."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from outrider.runtime.children import ServiceFailed, ServiceProcess
from outrider.runtime.metrics import Metrics
from outrider.runtime.serve import ServiceContext
from outrider.tokens import TokenTable
from outrider.v1 import common_pb2, draft_source_pb2, draft_source_pb2_grpc, retrieval_pb2, retrieval_pb2_grpc
from outrider.wire.channel import open_channel, server_options
from retrieval_service.service import build
from retrieval_service.settings import RetrievalSettings
from speculative.hashing import prefix_hash

LINE = "for index, value in enumerate(values):\n    print(index, value)\n"
Code = grpc.StatusCode


class Live:
    """A service, and what a verifier and an operator can call of it."""

    def __init__(self, channel: grpc.aio.Channel, tokens: TokenTable, metrics: Metrics | None = None) -> None:
        self.retrieval: Any = retrieval_pb2_grpc.RetrievalStub(channel)
        self.source: Any = draft_source_pb2_grpc.DraftSourceStub(channel)
        self.tokens = tokens
        self.metrics = metrics

    async def build(self, name: str, *texts: str, tenant: str = "", public: bool = True) -> Any:
        key = retrieval_pb2.CorpusName(name=name, tenant=tenant, public=public)
        messages = [retrieval_pb2.BuildCorpusRequest(start=key)]
        messages += [retrieval_pb2.BuildCorpusRequest(text=text) for text in texts]
        return await self.retrieval.BuildCorpus(iter(messages), timeout=60)

    async def names(self, tenant: str = "") -> list[str]:
        said = await self.retrieval.ListCorpora(retrieval_pb2.ListCorporaRequest(tenant=tenant), timeout=10)
        return [corpus.name.name for corpus in said.corpora]

    async def stats(self) -> Any:
        return await self.retrieval.Stats(retrieval_pb2.StatsRequest(), timeout=10)

    @asynccontextmanager
    async def attached(self) -> AsyncIterator["Attached"]:
        call = self.source.Attach()
        try:
            yield Attached(call, self.tokens)
        finally:
            call.cancel()


class Attached:
    """One verifier's stream."""

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
        async with asyncio.timeout(10):
            return await self.call.read()

    async def drafts(self) -> dict[str, list[int]]:
        """Ids by the name that they are credited to, of the next message."""
        message = await self.read()
        assert not message.refusals
        sources = message.sources or bytes(len(message.drafts))
        names = ("corpus", "past", "dense")
        return {names[k]: list(draft.ids) for k, draft in zip(sources, message.drafts, strict=True)}


@asynccontextmanager
async def serving(model: Path, folder: Path | None = None, **settings: Any) -> AsyncIterator[Live]:
    told = RetrievalSettings(tokenizer=str(model), folder="" if folder is None else str(folder), **settings)
    metrics = Metrics("retrieval")
    server = grpc.aio.server(options=server_options())
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    failures: list[BaseException] = []
    service = await build(ServiceContext(told, address, metrics, failures.append))
    service.register(server)
    await server.start()
    tokens = TokenTable.from_json((model / "tokenizer.json").read_text())
    async with AsyncExitStack() as stack:
        stack.push_async_callback(server.stop, 0)
        stack.push_async_callback(service.stop, 5.0)
        channel = await stack.enter_async_context(open_channel(address))
        await service.start()
        yield Live(channel, tokens, metrics)
    assert not failures


@asynccontextmanager
async def apart(model: Path, *flags: str) -> AsyncIterator[Live]:
    """A service as a process: FAISS and torch, which made the model, do not go together in one."""
    process = ServiceProcess.start("retrieval", "retrieval_service", ["--tokenizer", str(model), *flags])
    try:
        await asyncio.to_thread(process.wait_ready, 60.0)
        tokens = TokenTable.from_json((model / "tokenizer.json").read_text())
        async with open_channel(process.address) as channel:
            yield Live(channel, tokens)
    finally:
        assert process.stop(10.0) == 0


async def until_drafts(attached: Attached, source: str, ids: Iterable[int]) -> list[int]:
    """Follows anew under growing aliases until something of this source comes."""
    reading = asyncio.create_task(attached.drafts())
    for alias in range(100, 200):
        await attached.follow(list(ids), alias=alias)
        while (await asyncio.wait({reading}, timeout=0.2))[0]:
            if found := reading.result().get(source):
                return found
            reading = asyncio.create_task(attached.drafts())
    raise AssertionError(f"nothing came of {source}")


async def refused(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return error.value


async def test_it_says_under_which_names_it_drafts(tiny_llama: Path) -> None:
    async with serving(tiny_llama) as live:
        said = await live.source.Describe(draft_source_pb2.SourceDescribeRequest())
        assert list(said.names) == ["corpus", "past"], "there is nothing to find references with"
        assert said.tokenizer_digest == live.tokens.digest


async def test_a_corpus_that_is_built_while_drafting_is_drafted_from(
    tiny_llama: Path, tmp_path: Path
) -> None:
    async with serving(tiny_llama, tmp_path) as live, live.attached() as attached:
        ids = live.tokens.encode(LINE)
        await attached.follow(ids[:8])
        made = await live.build("lines", LINE, LINE)
        assert (made.documents, made.tokens) == (2, 2 * len(ids))
        await attached.commit(ids[8])
        assert (await attached.drafts())["corpus"][:6] == ids[9:15]
        assert (await live.stats()).corpus_tokens == 2 * len(ids)


async def test_lookups_go_on_while_corpora_are_built_replaced_and_removed(
    tiny_llama: Path, tmp_path: Path
) -> None:
    async with serving(tiny_llama, tmp_path) as live, live.attached() as attached:
        ids = live.tokens.encode(LINE)
        public = retrieval_pb2.CorpusName(name="lines", public=True)

        async def churn() -> None:
            for _ in range(3):
                await live.build("lines", LINE)
                unload = retrieval_pb2.UnloadCorpusRequest(name=public, remove=True)
                await live.retrieval.UnloadCorpus(unload, timeout=10)

        churning = asyncio.create_task(churn())
        alias = 0
        while not churning.done():
            alias += 1
            await attached.follow(ids[:8], alias=alias)
            await attached.commit(ids[8], alias=alias, end=True)
            await asyncio.sleep(0.002)
        await churning
        assert await live.names() == []
        assert not list((tmp_path / "corpora").glob("*/*"))
        await live.build("lines", LINE)
        assert (await until_drafts(attached, "corpus", ids[:8]))[:3] == ids[8:11]


async def test_tenants_see_their_own_alone(tiny_llama: Path, tmp_path: Path) -> None:
    async with serving(tiny_llama, tmp_path) as live, live.attached() as attached:
        await live.build("mine", LINE, tenant="a", public=False)
        assert await live.names("a") == ["mine"]
        assert await live.names("b") == await live.names("") == []
        ids = live.tokens.encode(LINE)
        await attached.follow(ids[:8], alias=1, tenant="b")
        await attached.follow(ids[:8], alias=2, tenant="a")
        message = await attached.read()
        assert {draft.alias for draft in message.drafts} == {2}
        await attached.follow(ids[:8], alias=3, tenant="b", corpora=["mine"])
        (refusal,) = (await attached.read()).refusals
        assert (refusal.alias, refusal.message) == (3, "tenant 'b' has no corpus 'mine' here")


async def test_past_output_lasts_and_is_forgotten_for_good(tiny_llama: Path, tmp_path: Path) -> None:
    output = [40, 41, 42, 43, 44, 45]
    async with serving(tiny_llama, tmp_path) as live, live.attached() as attached:
        await attached.follow([7, 8, 9], tenant="a")
        await attached.commit(*output, end=True)
        await attached.follow([3, 40, 41], alias=2, tenant="a")
        assert (await attached.drafts())["past"] == output[2:]
        await attached.follow([3, 40, 41], alias=3, tenant="b")
        await attached.follow([3, 40, 41, 42], alias=4, tenant="a")
        assert (await attached.read()).drafts[0].alias == 4, "nothing for the other tenant"
    async with serving(tiny_llama, tmp_path) as live, live.attached() as attached:
        assert (await live.stats()).past_tokens == len(output)
        await attached.follow([3, 40, 41], tenant="a")
        assert (await attached.drafts())["past"] == output[2:], "the next process knows it"
        await live.retrieval.Forget(retrieval_pb2.ForgetRequest(tenant="a", session="s1"), timeout=10)
        assert (await live.stats()).past_tokens == 0
    async with serving(tiny_llama, tmp_path) as live:
        assert (await live.stats()).past_tokens == 0


async def test_references_are_found_copied_from_and_removed(tiny_llama: Path, tmp_path: Path) -> None:
    flags = ("--folder", str(tmp_path), "--embeddings", str(tiny_llama))
    async with apart(tiny_llama, *flags) as live, live.attached() as attached:
        said = await live.source.Describe(draft_source_pb2.SourceDescribeRequest())
        assert list(said.names) == ["corpus", "past", "dense"]
        messages = [
            retrieval_pb2.AddReferencesRequest(reference=retrieval_pb2.Reference(name="lines", text=LINE * 3))
        ]
        added = await live.retrieval.AddReferences(iter(messages), timeout=10)
        assert added.documents == 1
        ids = live.tokens.encode(LINE * 3)
        await attached.follow(ids[:30])
        reading = asyncio.create_task(attached.drafts())
        for token in ids[30:40]:  # what is near is looked for beside the lookups, and there for a later one
            await attached.commit(token)
            if (await asyncio.wait({reading}, timeout=0.2))[0]:
                break
        assert set((await reading)["dense"]) <= set(ids[30:])
        await attached.follow(ids[:30], alias=250, tenant="other")
        await live.retrieval.Forget(retrieval_pb2.ForgetRequest(tenant=""), timeout=10)
        assert (await live.stats()).references == 0
        await attached.follow(ids[:30], alias=251)
        reading = asyncio.create_task(attached.drafts())
        await attached.commit(*ids[30:33], alias=251)
        await asyncio.wait({reading}, timeout=0.5)
        assert not reading.done() or "dense" not in reading.result()
        reading.cancel()


BAD = {
    "a name that is a path": (("../lines", LINE), {}, Code.INVALID_ARGUMENT, "cannot name a corpus"),
    "both public and somebody's": (("x", LINE), {"tenant": "a"}, Code.INVALID_ARGUMENT, "not both"),
    "nobody's": (("x", LINE), {"public": False}, Code.INVALID_ARGUMENT, "nobody's"),
    "no document": (("x",), {}, Code.INVALID_ARGUMENT, "nothing to index"),
    "an empty document": (("x", ""), {}, Code.INVALID_ARGUMENT, "nothing to index"),
}


@pytest.mark.parametrize("what", BAD)
async def test_a_bad_build_says_what_is_wrong(tiny_llama: Path, tmp_path: Path, what: str) -> None:
    texts, given, code, why = BAD[what]
    async with serving(tiny_llama, tmp_path) as live:
        error = await refused(live.build(*texts, **given))
        assert (error.code(), why in (error.details() or "")) == (code, True), error.details()
        assert await live.names() == []


async def test_ids_outside_the_vocabulary_are_no_document(tiny_llama: Path, tmp_path: Path) -> None:
    async with serving(tiny_llama, tmp_path) as live:
        messages = [
            retrieval_pb2.BuildCorpusRequest(start=retrieval_pb2.CorpusName(name="x", public=True)),
            retrieval_pb2.BuildCorpusRequest(ids=retrieval_pb2.DocumentIds(ids=[5, 4000])),
        ]
        error = await refused(live.retrieval.BuildCorpus(iter(messages), timeout=10))
        assert (error.code(), "id 4000" in (error.details() or "")) == (Code.INVALID_ARGUMENT, True)


async def test_two_builds_of_one_name_do_not_meet(tiny_llama: Path, tmp_path: Path) -> None:
    async with serving(tiny_llama, tmp_path) as live:
        done = await asyncio.gather(
            live.build("lines", LINE), live.build("lines", LINE), return_exceptions=True
        )
        (error,) = [one for one in done if isinstance(one, grpc.aio.AioRpcError)]
        assert error.code() is Code.ABORTED
        assert await live.names() == ["lines"]


async def test_what_is_not_there_cannot_be_loaded_or_unloaded(tiny_llama: Path, tmp_path: Path) -> None:
    key = retrieval_pb2.CorpusName(name="lines", public=True)
    async with serving(tiny_llama, tmp_path) as live:
        for call in (
            live.retrieval.LoadCorpus(retrieval_pb2.LoadCorpusRequest(name=key)),
            live.retrieval.UnloadCorpus(retrieval_pb2.UnloadCorpusRequest(name=key)),
        ):
            assert (await refused(call)).code() is Code.NOT_FOUND
        await live.build("lines", LINE)
        await live.retrieval.UnloadCorpus(retrieval_pb2.UnloadCorpusRequest(name=key))
        assert await live.names() == []
        assert (await live.retrieval.LoadCorpus(retrieval_pb2.LoadCorpusRequest(name=key))).documents == 1
    async with serving(tiny_llama, tmp_path) as live:
        assert await live.names() == ["lines"], "and what was built is there again"


async def test_without_a_folder_nothing_is_built(tiny_llama: Path) -> None:
    async with serving(tiny_llama) as live:
        error = await refused(live.build("lines", LINE))
        assert (error.code(), "--folder" in (error.details() or "")) == (Code.FAILED_PRECONDITION, True)


async def test_hostile_follows_are_refused_by_alias_and_the_stream_goes_on(tiny_llama: Path) -> None:
    async with serving(tiny_llama) as live, live.attached() as attached:
        hostile: list[dict[str, Any]] = [
            {"tokenizer_digest": "f" * 64},
            {"prompt_length": 9},
            {"vocabulary_size": 0},
            {"ids": [95, 400]},
            {"sampling": common_pb2.Sampling(temperature=-1)},
            {"key": common_pb2.SessionKey(session="two\nlines")},
        ]
        for alias, given in enumerate(hostile, start=1):
            await attached.follow([5, 6], alias=alias, **given)
        refusals: dict[int, str] = {}
        while len(refusals) < len(hostile):
            refusals |= {refusal.alias: refusal.message for refusal in (await attached.read()).refusals}
        assert list(refusals) == list(range(1, len(hostile) + 1))
        assert "f" * 64 in refusals[1]
        await attached.follow([5, 6], alias=50, tenant="a")
        await attached.commit(7, 8, 9, alias=50, end=True)
        await attached.follow([3, 7, 8], alias=51, tenant="a")
        assert (await attached.drafts())["past"] == [9]


async def test_its_metrics_say_what_it_holds_and_how_long_lookups_take(
    tiny_llama: Path, tmp_path: Path
) -> None:
    async with serving(tiny_llama, tmp_path) as live, live.attached() as attached:
        await live.build("lines", LINE)
        await until_drafts(attached, "corpus", live.tokens.encode(LINE)[:8])
        assert live.metrics is not None
        shown = live.metrics.exposition().decode()
        for line in (
            "outrider_retrieval_corpora 1.0",
            'lookup_seconds_count{memory="corpus"}',
            "mapped_bytes",
        ):
            assert line in shown
        assert "outrider_retrieval_mapped_bytes 0.0" not in shown


async def test_without_embeddings_there_are_no_references(tiny_llama: Path) -> None:
    async with serving(tiny_llama) as live:
        messages = [retrieval_pb2.AddReferencesRequest(reference=retrieval_pb2.Reference(name="a", text="b"))]
        error = await refused(live.retrieval.AddReferences(iter(messages), timeout=10))
        assert (error.code(), "--embeddings" in (error.details() or "")) == (Code.FAILED_PRECONDITION, True)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--corpus", "/nowhere/corpus"), "no corpus there"),
        (("--tokenizer", "/nowhere"), "no tokenizer at '/nowhere'"),
        (("--embeddings", "/nowhere"), "/nowhere"),
        (("--past-tokens", "5"), "past_tokens"),
    ],
)
def test_what_cannot_be_used_is_a_reason_not_to_start(
    tiny_llama: Path, flags: tuple[str, ...], says: str
) -> None:
    told = ("--tokenizer", str(tiny_llama)) if "--tokenizer" not in flags else ()
    process = ServiceProcess.start("retrieval", "retrieval_service", [*told, *flags])
    try:
        with pytest.raises(ServiceFailed, match=says):
            process.wait_ready(60.0)
    finally:
        process.stop(5.0)
