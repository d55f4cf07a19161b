"""A stream of documents without an end is refused, and holds up nobody else's."""

import asyncio
import errno
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain, repeat
from pathlib import Path

import grpc.aio
import pytest
from live_retrieval import LINE, Code, apart, refused, refused_amid, serving

from outrider.tokens import TokenTable
from outrider.v1 import retrieval_pb2
from retrieval_service.building.builds import BUILDS_OF_A_TENANT, INCOMING, Builds, Spool, SpoolRoom
from speculative.errors import Overloaded

Build = retrieval_pb2.BuildCorpusRequest


@pytest.fixture
def tokens(tiny_llama: Path) -> TokenTable:
    return TokenTable.from_json((tiny_llama / "tokenizer.json").read_text())


def start(name: str, tenant: str = "a") -> Build:
    return Build(start=retrieval_pb2.CorpusName(name=name, tenant=tenant))


def without_end(first: Build, document: Build) -> Iterator[Build]:
    return chain([first], repeat(document))


def documents(count: int, tokens: int) -> Iterator[retrieval_pb2.AddDocumentsRequest]:
    """The same document again and again: it never takes more memory."""
    ids = retrieval_pb2.DocumentIds(ids=[5] * tokens)
    document = retrieval_pb2.Document(name="same", ids=ids)
    return repeat(retrieval_pb2.AddDocumentsRequest(tenant="a", document=document), count)


async def test_an_endless_build_ends_at_the_most_text_of_a_tenant(tiny_llama: Path, tmp_path: Path) -> None:
    async with serving(tiny_llama, tmp_path, ingest_mb=1) as live:
        document = Build(text=LINE * 500)
        error = await refused_amid(live, "BuildCorpus", without_end(start("x"), document))
        assert error.code() is Code.RESOURCE_EXHAUSTED
        assert "more than 1 MiB (ingest_mb)" in str(error.details())
        assert not list((tmp_path / "corpora").glob(f"{INCOMING}*")), "its documents are gone"
        assert (await live.build("lines", LINE)).documents == 1


async def test_corpora_of_a_tenant_take_no_more_than_its_room_on_the_disk(
    tiny_llama: Path, tmp_path: Path
) -> None:
    async with serving(tiny_llama, tmp_path, corpora_mb_of_tenant=1) as live:

        async def build(name: str, lines: int, tenant: str = "a") -> str:
            """What a build of so many lines was refused for; "" where it was not."""
            try:
                await live.build(name, LINE * lines, tenant=tenant, public=False)
            except grpc.aio.AioRpcError as error:
                return f"{error.code().name}: {error.details()}"
            return ""

        half = 600_000 // (6 * len(live.tokens.encode(LINE)))
        assert await build("one", half) == ""
        assert await build("one", half) == "", "a corpus that is replaced does not count"
        refusal = await build("two", half)
        assert refusal.startswith(Code.RESOURCE_EXHAUSTED.name)
        assert "more than 1 MiB together (corpora_mb_of_tenant)" in refusal
        assert await live.names("a") == ["one"]
        assert not list((tmp_path / "corpora").glob("*/two/*")), "nothing is left of it"
        at_once = await asyncio.gather(*(build(name, half, tenant="b") for name in ("two", "three")))
        assert "" in at_once, "another tenant has room of its own"
        assert "more than 1 MiB" in "".join(at_once), "the second of two builds counts what the first took"
        assert await build("small", half // 4) == ""
        assert "more than 1 MiB" in await build("one", 2 * half), "one that grows counts as it is now"
        assert await live.names("a") == ["one", "small"]


@pytest.mark.parametrize("nothing", [Build(text=""), Build(ids=retrieval_pb2.DocumentIds()), Build()])
async def test_an_endless_build_of_empty_documents_ends_at_the_first(
    tiny_llama: Path, tmp_path: Path, nothing: Build
) -> None:
    async with serving(tiny_llama, tmp_path) as live:
        error = await refused_amid(live, "BuildCorpus", without_end(start("x"), nothing))
        assert error.code() is Code.INVALID_ARGUMENT


async def test_builds_of_a_tenant_are_bounded_and_other_tenants_build_beside_them(
    tiny_llama: Path, tmp_path: Path
) -> None:
    async with serving(tiny_llama, tmp_path) as live:
        begun = []
        for number in range(BUILDS_OF_A_TENANT):
            call = live.retrieval.BuildCorpus()
            await call.write(start(f"{number}"))
            await call.write(Build(text=LINE))
            begun.append(call)
        async with asyncio.timeout(60):
            while len(list((tmp_path / "corpora").glob(f"{INCOMING}*"))) < BUILDS_OF_A_TENANT:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        messages = [start("more"), Build(text=LINE)]
        error = await refused(live.retrieval.BuildCorpus(iter(messages), timeout=100))
        assert error.code() is Code.RESOURCE_EXHAUSTED
        assert f"{BUILDS_OF_A_TENANT} corpora of the tenant" in str(error.details())
        assert (await live.build("lines", LINE)).documents == 1, "a public corpus is nobody's"
        for call in begun:
            call.cancel()


def test_builds_of_one_tenant_share_its_room_and_give_it_back() -> None:
    builds = Builds(most_mb=1, corpora_mb=1)
    with builds.room("a") as room:
        room.take(600_000)
        with builds.room("a") as same, pytest.raises(Overloaded, match="more than 1 MiB"):
            same.take(600_000)
        with builds.room("b") as others:
            others.take(600_000)
        room.give_back(600_000)
        with builds.room("a") as same:
            same.take(600_000)
    assert SpoolRoom(1).most_mb == 1


async def test_a_document_that_comes_after_the_end_of_its_build_takes_no_room(
    tokens: TokenTable, tmp_path: Path
) -> None:
    room = SpoolRoom(1)
    async with Spool(tmp_path, tokens, room) as spool:
        spool.add(Build(text="one"))
    with pytest.raises(ValueError, match="not open"):
        spool.add(Build(text="two"))
    room.take(1 << 20)


def open_files() -> Iterator[str]:
    """Files that this process has open."""
    for file in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # closed since it was listed
            yield os.readlink(file)


async def test_a_spool_that_cannot_be_opened_leaves_no_file_open_and_no_folder(
    tokens: TokenTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(OSError, match="No space"):
        async with Spool(tmp_path, tokens, SpoolRoom(1)):
            pass
    assert not [file for file in open_files() if str(tmp_path) in file]
    assert not os.listdir(tmp_path)


async def test_the_tokenizer_of_a_build_is_written_off_the_event_loop(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []
    real = TokenTable.to_json

    def to_json(tokens: TokenTable) -> str:
        threads.append(threading.current_thread())
        return real(tokens)

    async with serving(tiny_llama, tmp_path) as live:
        monkeypatch.setattr(TokenTable, "to_json", to_json)
        assert (await live.build("x", LINE)).documents == 1
    assert len(threads) == 1
    assert threading.current_thread() not in threads


@pytest.mark.parametrize("said", [[start("x")], []], ids=["more", "at all"])
async def test_a_stream_that_says_nothing_is_given_up(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[Build]
) -> None:
    async with serving(tiny_llama, tmp_path) as live:
        with monkeypatch.context() as impatient:
            impatient.setattr("retrieval_service.server.DOCUMENT_S", 0.1)
            call = live.retrieval.BuildCorpus()
            for message in said:
                await call.write(message)
            with pytest.raises(grpc.aio.AioRpcError, match="no message came for 0 s"):
                await asyncio.wait_for(call, 60)
        assert (await live.build("x", LINE)).documents == 1


async def test_one_call_brings_no_more_documents_than_a_tenant_may_have(tiny_llama: Path) -> None:
    flags = ("--embeddings", str(tiny_llama), "--document-tokens-of-tenant", "2000")
    async with apart(tiny_llama, *flags) as live:
        error = await refused_amid(live, "AddDocuments", documents(1000, 100))
        assert error.code() is Code.RESOURCE_EXHAUSTED
        assert "one call brings more than 2000 tokens" in str(error.details())
        error = await refused_amid(live, "AddDocuments", documents(1000, 1))
        assert "one call brings more than 2000 tokens" in str(error.details()), "a short one counts, too"
        added = await live.retrieval.AddDocuments(documents(5, 100), timeout=100)
        assert added.documents == 1
