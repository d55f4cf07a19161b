"""The service over real gRPC: drafts while corpora come and go, tenants apart, nothing lost at a restart."""

import asyncio
import contextlib
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from live_retrieval import LINE, Attached, Code, Live, apart, refused, serving

from outrider.runtime.children import ServiceFailed, ServiceProcess
from outrider.v1 import common_pb2, draft_source_pb2, retrieval_pb2
from retrieval_service.building.builds import Builds
from retrieval_service.loading import open_corpus
from retrieval_service.store import CorpusStore


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


async def test_it_says_under_which_names_it_drafts(tiny_llama: Path) -> None:
    async with serving(tiny_llama) as live:
        said = await live.source.Describe(draft_source_pb2.SourceDescribeRequest())
        assert list(said.names) == ["corpus", "past"], "there is nothing to find documents with"
        assert said.tokenizer_digest == live.tokens.digest


@pytest.mark.parametrize("past", [True, False])
async def test_it_says_that_it_learns_where_it_keeps_past_outputs(tiny_llama: Path, past: bool) -> None:
    async with serving(tiny_llama, past=past) as live:
        said = await live.source.Describe(draft_source_pb2.SourceDescribeRequest())
    assert (said.HasField("learns"), said.learns) == (True, past)


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
                await live.retrieval.UnloadCorpus(unload, timeout=100)

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
        await live.retrieval.Forget(retrieval_pb2.ForgetRequest(tenant="a", session="s1"), timeout=100)
        assert (await live.stats()).past_tokens == 0
    async with serving(tiny_llama, tmp_path) as live:
        assert (await live.stats()).past_tokens == 0


async def test_documents_are_found_copied_from_and_removed(tiny_llama: Path, tmp_path: Path) -> None:
    flags = ("--folder", str(tmp_path), "--embeddings", str(tiny_llama))
    async with apart(tiny_llama, *flags) as live, live.attached() as attached:
        said = await live.source.Describe(draft_source_pb2.SourceDescribeRequest())
        assert list(said.names) == ["corpus", "past", "dense"]
        messages = [
            retrieval_pb2.AddDocumentsRequest(document=retrieval_pb2.Document(name="lines", text=LINE * 3))
        ]
        added = await live.retrieval.AddDocuments(iter(messages), timeout=100)
        assert added.documents == 1
        ids = live.tokens.encode(LINE * 3)
        await attached.follow(ids[:30])
        reading = asyncio.create_task(attached.drafts())
        for place in range(10):  # what is near is looked for beside the lookups, and there for a later one
            await attached.commit(ids[30 + place])
            if (await asyncio.wait({reading}, timeout=0.2 + place))[0]:
                break
        assert set((await reading)["dense"]) <= set(ids[30:])
        await attached.follow(ids[:30], alias=250, tenant="other")
        await live.retrieval.Forget(retrieval_pb2.ForgetRequest(tenant=""), timeout=100)
        assert (await live.stats()).documents == 0
        await attached.follow(ids[:30], alias=251)
        await attached.commit(*ids[30:33], alias=251)
        found = []  # drafts of before may still come, for the sessions of before
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                while True:
                    found += [draft for draft in (await attached.read()).drafts if draft.alias == 251]
        assert found == []


BAD = {
    "a name that is a path": (("../lines", LINE), {}, Code.INVALID_ARGUMENT, "cannot name a corpus"),
    "both public and somebody's": (("x", LINE), {"tenant": "a"}, Code.INVALID_ARGUMENT, "not both"),
    "nobody's": (("x", LINE), {"public": False}, Code.INVALID_ARGUMENT, "nobody's"),
    "no document": (("x",), {}, Code.INVALID_ARGUMENT, "nothing to index"),
    "an empty document": (("x", ""), {}, Code.INVALID_ARGUMENT, "a document has no text"),
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
        error = await refused(live.retrieval.BuildCorpus(iter(messages), timeout=100))
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


async def test_a_corpus_that_is_removed_while_a_call_loads_it_stays_removed(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, go_on, removing = threading.Event(), threading.Event(), asyncio.Event()

    def open_slowly(*given: Any) -> Any:
        index = open_corpus(*given)
        opened.set()
        assert go_on.wait(60)
        return index

    building = Builds.building

    def begin_to_remove(builds: Builds, path: Path) -> Any:
        removing.set()
        return building(builds, path)

    key = retrieval_pb2.CorpusName(name="lines", public=True)
    async with serving(tiny_llama, tmp_path) as live:
        await live.build("lines", LINE)
        monkeypatch.setattr("retrieval_service.server.open_corpus", open_slowly)
        monkeypatch.setattr(Builds, "building", begin_to_remove)
        try:
            load = live.retrieval.LoadCorpus(retrieval_pb2.LoadCorpusRequest(name=key), timeout=100)
            loading = asyncio.ensure_future(load)
            assert await asyncio.to_thread(opened.wait, 60)
            unload = retrieval_pb2.UnloadCorpusRequest(name=key, remove=True)
            unloading = asyncio.ensure_future(live.retrieval.UnloadCorpus(unload, timeout=100))
            await asyncio.wait_for(removing.wait(), 60)
            await live.names()  # the worker has done what the removal asked of it by now
        finally:
            go_on.set()
        await asyncio.gather(loading, unloading)
        assert await live.names() == []
        assert not list((tmp_path / "corpora").glob("*/*"))


LINES = retrieval_pb2.CorpusName(name="lines", public=True)


async def cancelled_at(live: Live, call: Any, begun: threading.Event) -> None:
    """Cancels a call once its thread has begun, and lets the service hear of it."""
    sent = asyncio.ensure_future(call)
    assert await asyncio.to_thread(begun.wait, 60)
    sent.cancel()
    for _ in range(20):
        await live.names()


async def test_no_call_builds_or_loads_a_corpus_that_a_cancelled_call_still_removes(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    remove = CorpusStore.remove

    def remove_slowly(*given: Any) -> bool:
        begun.set()
        assert go_on.wait(60)
        return remove(*given)

    monkeypatch.setattr(CorpusStore, "remove", remove_slowly)
    async with serving(tiny_llama, tmp_path) as live:
        await live.build("lines", LINE)
        try:
            unload = retrieval_pb2.UnloadCorpusRequest(name=LINES, remove=True)
            await cancelled_at(live, live.retrieval.UnloadCorpus(unload, timeout=100), begun)
            assert (await refused(live.build("lines", LINE))).code() is Code.ABORTED
            load = live.retrieval.LoadCorpus(retrieval_pb2.LoadCorpusRequest(name=LINES), timeout=100)
            loading = asyncio.ensure_future(load)
            await live.names()
        finally:
            go_on.set()
        assert (await refused(loading)).code() is Code.NOT_FOUND
        assert (await live.build("lines", LINE)).documents == 1


async def test_no_call_removes_a_corpus_that_a_cancelled_call_still_opens(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, order = threading.Event(), threading.Event(), list[str]()
    remove = CorpusStore.remove

    def open_slowly(*given: Any) -> Any:
        begun.set()
        assert go_on.wait(60)
        index = open_corpus(*given)
        order.append("opened")
        return index

    def note_removal(*given: Any) -> bool:
        order.append("removed")
        return remove(*given)

    async with serving(tiny_llama, tmp_path) as live:
        await live.build("lines", LINE)
        monkeypatch.setattr("retrieval_service.server.open_corpus", open_slowly)
        monkeypatch.setattr(CorpusStore, "remove", note_removal)
        try:
            load = live.retrieval.LoadCorpus(retrieval_pb2.LoadCorpusRequest(name=LINES), timeout=100)
            await cancelled_at(live, load, begun)
            unload = retrieval_pb2.UnloadCorpusRequest(name=LINES, remove=True)
            unloading = asyncio.ensure_future(live.retrieval.UnloadCorpus(unload, timeout=100))
            for _ in range(20):
                await live.names()
        finally:
            go_on.set()
        await unloading
        assert order == ["opened", "removed"]
        assert await live.names() == []


async def test_only_what_its_requests_allowed_to_learn_from_is_exported_and_only_to_its_tenant(
    tiny_llama: Path,
) -> None:
    async def exported(tenant: str) -> list[list[int]]:
        request = retrieval_pb2.ExportPastRequest(tenant=tenant)
        first, *others = [message async for message in live.retrieval.ExportPast(request, timeout=60)]
        assert (first.outputs, first.tokenizer_digest) == (len(others), live.tokens.digest)
        return [list(message.output.ids) for message in others]

    async with serving(tiny_llama) as live, live.attached() as attached:
        await attached.follow([5, 6], alias=1, tenant="a")
        await attached.commit(21, 22, alias=1, end=True)
        await attached.follow([5, 6], alias=2, tenant="a", learn=False)
        await attached.commit(31, 32, alias=2, end=True)
        await attached.follow([5, 6], alias=3, tenant="b")
        await attached.commit(41, 42, alias=3, end=True)
        await attached.follow([3, 41], alias=50, tenant="b")
        assert (await attached.drafts())["past"] == [42], "everything before was learnt"
        assert await exported("a") == [[21, 22]]
        assert await exported("b") == [[41, 42]]
        await live.retrieval.Forget(retrieval_pb2.ForgetRequest(tenant="a", session="s1"), timeout=60)
        assert await exported("a") == await exported("nobody") == []


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


async def test_a_service_that_ends_refuses_calls_and_leaves_none_waiting(
    tiny_llama: Path, tmp_path: Path
) -> None:
    async with serving(tiny_llama, tmp_path) as live:
        assert live.service is not None
        await live.service.stop(5.0)  # its server ends the calls that are left, but only after a grace
        for call in (
            live.retrieval.ListCorpora(retrieval_pb2.ListCorporaRequest(), timeout=100),
            live.retrieval.Forget(retrieval_pb2.ForgetRequest(tenant="a"), timeout=100),
            live.retrieval.Stats(retrieval_pb2.StatsRequest(), timeout=100),
        ):
            error = await refused(call)
            assert (error.code(), error.details()) == (
                Code.UNAVAILABLE,
                "the retrieval worker ends; ask again",
            )


async def test_without_embeddings_there_are_no_documents(tiny_llama: Path) -> None:
    async with serving(tiny_llama) as live:
        messages = [retrieval_pb2.AddDocumentsRequest(document=retrieval_pb2.Document(name="a", text="b"))]
        error = await refused(live.retrieval.AddDocuments(iter(messages), timeout=100))
        assert (error.code(), "--embeddings" in (error.details() or "")) == (Code.FAILED_PRECONDITION, True)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--corpus", "/nowhere/corpus"), "no corpus there"),
        (("--tokenizer", "/nowhere"), "no tokenizer at '/nowhere'"),
        (("--embeddings", "/nowhere"), "/nowhere"),
        (("--embeddings-url", "127.0.0.1:8080/v1"), "is not the URL of a server"),
        (("--past-tokens", "5"), "past_tokens"),
    ],
)
def test_what_cannot_be_used_is_a_reason_not_to_start(
    tiny_llama: Path, flags: tuple[str, ...], says: str
) -> None:
    tokenizer = ("--tokenizer", str(tiny_llama)) if "--tokenizer" not in flags else ()
    process = ServiceProcess.start("retrieval", "retrieval_service", [*tokenizer, *flags])
    try:
        with pytest.raises(ServiceFailed, match=says):
            process.wait_ready(250)
    finally:
        process.stop(5.0)
