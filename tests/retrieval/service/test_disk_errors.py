"""What goes wrong beside drafting: empty builds, damaged corpora, dead builders, full disks, greed."""

import asyncio
import errno
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from live_retrieval import LINE, Code, Live, apart, refused, serving

from outrider.v1 import retrieval_pb2
from retrieval_service.building.builds import INCOMING, remove_left
from retrieval_service.corpus.layout import BUILD, HEADER
from retrieval_service.corpus.lock import held
from retrieval_service.dense.manifest import read_manifest
from retrieval_service.loading import load
from retrieval_service.past.outputs import PastOutputs
from retrieval_service.server import explained_disk_errors
from retrieval_service.settings import RetrievalSettings
from speculative.errors import OutriderError, Overloaded

LINES = retrieval_pb2.CorpusName(name="lines", public=True)


def unload(remove: bool) -> retrieval_pb2.UnloadCorpusRequest:
    return retrieval_pb2.UnloadCorpusRequest(name=LINES, remove=remove)


async def until(what: Callable[[], bool]) -> None:
    for _ in range(6000):
        if what():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came to be")


async def test_a_build_without_an_id_leaves_what_was_there(tiny_llama: Path, tmp_path: Path) -> None:
    async with serving(tiny_llama, tmp_path) as live:
        made = await live.build("lines", LINE)
        assert (await refused(live.build("lines", ""))).code() is Code.INVALID_ARGUMENT
        assert (await refused(live.build("new", ""))).code() is Code.INVALID_ARGUMENT
    async with serving(tiny_llama, tmp_path) as live:
        assert await live.names() == ["lines"], "a refused build makes no corpus, now or at the next start"
        assert (await live.stats()).corpus_tokens == made.tokens
    assert not (tmp_path / "corpora" / "public" / "new").exists()


@pytest.mark.parametrize("damage", ["header", "text"])
async def test_a_damaged_corpus_is_left_out_and_can_be_removed(
    damage: str, tiny_llama: Path, tmp_path: Path
) -> None:
    async with serving(tiny_llama, tmp_path) as live:
        await live.build("lines", LINE)
    (folder,) = (tmp_path / "corpora").glob("*/lines")
    path = folder / HEADER if damage == "header" else next(folder.glob("*.text"))
    path.write_bytes(path.read_bytes()[:-9])
    async with serving(tiny_llama, tmp_path) as live:
        assert await live.names() == []
        await live.retrieval.UnloadCorpus(unload(remove=True), timeout=100)
        assert not folder.exists()
        assert (await refused(live.retrieval.UnloadCorpus(unload(remove=True)))).code() is Code.NOT_FOUND
        assert (await live.build("lines", LINE)).documents == 1


async def test_an_unreadable_corpus_is_left_out(tiny_llama: Path, tmp_path: Path) -> None:
    async with serving(tiny_llama, tmp_path) as live:
        await live.build("lines", LINE)
        await live.build("others", LINE)
    (folder,) = (tmp_path / "corpora").glob("*/lines")
    (folder / HEADER).unlink()
    (folder / HEADER).mkdir()  # for root, too, this cannot be read
    async with serving(tiny_llama, tmp_path) as live:
        assert await live.names() == ["others"]


async def test_a_folder_of_corpora_needs_no_tokenizer_to_start(tiny_llama: Path, tmp_path: Path) -> None:
    async with serving(tiny_llama, tmp_path) as live:
        await live.build("lines", LINE)
    loaded = await asyncio.to_thread(load, RetrievalSettings(folder=str(tmp_path)))
    assert not list(loaded.catalogue)
    loaded.close()


async def test_two_corpora_of_one_name_are_a_reason_not_to_start(tiny_llama: Path, tmp_path: Path) -> None:
    async with serving(tiny_llama, tmp_path) as live:
        await live.build("lines", LINE)
    (folder,) = (tmp_path / "corpora").glob("*/lines")
    shutil.copytree(folder, tmp_path / "more" / "lines")
    paths = (str(folder), str(tmp_path / "more" / "lines"))
    both = RetrievalSettings(tokenizer=str(tiny_llama), corpus=paths)
    with pytest.raises(OutriderError, match="two corpora would be called 'lines'"):
        load(both)


async def test_a_build_whose_client_vanishes_leaves_nothing(tiny_llama: Path, tmp_path: Path) -> None:
    async with serving(tiny_llama, tmp_path) as live:
        begun = live.retrieval.BuildCorpus()
        await begun.write(retrieval_pb2.BuildCorpusRequest(start=LINES))
        await begun.write(retrieval_pb2.BuildCorpusRequest(text=LINE))
        await until(lambda: bool(list((tmp_path / "corpora").glob(f"{INCOMING}*"))))
        begun.cancel()
        # A build may have begun: to the server the stream can seem to end a moment before it is cancelled.
        await until(lambda: not list((tmp_path / "corpora").glob("*/*")))
        assert (await live.build("lines", LINE)).documents == 1


def test_what_a_dead_process_took_in_is_removed_and_what_a_living_one_takes_in_stays(tmp_path: Path) -> None:
    (tmp_path / f"{INCOMING}dead").mkdir()
    (tmp_path / f"{INCOMING}dead" / "documents").write_text("{}")
    (tmp_path / f"{INCOMING}alive").mkdir()
    code = (
        "import fcntl, os, sys\n"
        "lock = os.open(sys.argv[1], os.O_RDONLY)\n"
        "fcntl.flock(lock, fcntl.LOCK_EX)\n"
        "print(flush=True)\n"
        "sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path / f"{INCOMING}alive")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        remove_left(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == [f"{INCOMING}alive"]
        other.communicate()
    remove_left(tmp_path)
    assert not list(tmp_path.iterdir())


async def test_what_a_dead_worker_had_built_of_a_corpus_is_removed_at_the_next_start(
    tiny_llama: Path, tmp_path: Path
) -> None:
    async with serving(tiny_llama, tmp_path) as live:
        await live.build("lines", LINE)
        await live.build("mine", LINE, tenant="a", public=False)
    (whole,) = (tmp_path / "corpora").glob("*/lines")
    (mine,) = (tmp_path / "corpora").glob("*/mine")
    before = {path.name for path in whole.iterdir()}
    (mine / HEADER).unlink()  # as a first build leaves its folder
    (whole / "000002-00000.text").write_bytes(b"secret")
    (whole / BUILD).write_text("{}")
    with held(mine):
        await asyncio.to_thread(remove_left, tmp_path / "corpora")
        assert any(mine.glob("*.text")), "another process builds it"
    async with serving(tiny_llama, tmp_path) as live:
        assert await live.names("a") == ["lines"]
    assert {path.name for path in whole.iterdir()} == before
    assert not mine.exists()


async def test_a_full_disk_is_no_bug_and_leaves_no_dead_shards(tiny_llama: Path, tmp_path: Path) -> None:
    flags = ("--folder", str(tmp_path), "--embeddings", str(tiny_llama))
    async with apart(tiny_llama, *flags) as live:
        made = await live.build("lines", LINE)
        limit_files(live.pid, 20_000)
        error = await refused(live.build("lines", *[LINE * 20] * 40))
        assert (error.code(), "room" in (error.details() or "")) == (Code.RESOURCE_EXHAUSTED, True)
        large = [
            retrieval_pb2.AddDocumentsRequest(document=retrieval_pb2.Document(name=f"{n}", text=LINE * 99))
            for n in range(9)
        ]
        error = await refused(live.retrieval.AddDocuments(iter(large), timeout=100))
        assert (error.code(), "not yet on the disk" in (error.details() or "")) == (
            Code.RESOURCE_EXHAUSTED,
            True,
        )
        limit_files(live.pid, resource.RLIM_INFINITY)
        assert (await live.stats()).corpus_tokens == made.tokens
        assert not list((tmp_path / "corpora").glob(f"{INCOMING}*"))
        assert (await live.retrieval.AddDocuments(iter(large), timeout=100)).documents == 9
        assert (await live.build("lines", LINE, LINE)).documents == 2


OUTPUT = [40, 41, 42, 43, 44, 45]


def is_written(folder: Path) -> bool:
    pattern = np.array(OUTPUT, "<u4").tobytes()
    return any(pattern in path.read_bytes() for path in folder.rglob("*.*"))


async def add_line(live: Live, tenant: str) -> None:
    document = retrieval_pb2.Document(name="one", text=LINE)
    message = retrieval_pb2.AddDocumentsRequest(tenant=tenant, document=document)
    await live.retrieval.AddDocuments(iter([message]), timeout=100)


async def test_a_full_disk_keeps_nothing_of_a_tenant_that_is_forgotten(
    tiny_llama: Path, tmp_path: Path
) -> None:
    flags = ("--folder", str(tmp_path), "--embeddings", str(tiny_llama))
    forget = retrieval_pb2.ForgetRequest(tenant="a")
    async with apart(tiny_llama, *flags) as live, live.attached() as attached:
        await attached.follow([7, 8, 9], tenant="a")
        await attached.commit(*OUTPUT, end=True)
        await add_line(live, "a")
        await until(lambda: is_written(tmp_path / "past"))
        limit_files(live.pid, 200)
        error = await refused(live.retrieval.Forget(forget, timeout=100))
        assert (error.code(), "in memory, not yet on the disk" in (error.details() or "")) == (
            Code.RESOURCE_EXHAUSTED,
            True,
        )
        held = await live.stats()
        assert (held.past_tokens, held.documents) == (0, 0)
        assert not is_written(tmp_path / "past"), "it needs no room to go"
        limit_files(live.pid, resource.RLIM_INFINITY)
        await live.retrieval.Forget(forget, timeout=100)
    assert not list((tmp_path / "documents").glob("*.ids"))


async def test_what_an_earlier_start_kept_is_forgotten_by_one_that_does_not_read_it(
    tiny_llama: Path, tmp_path: Path
) -> None:
    flags = ("--folder", str(tmp_path), "--embeddings", str(tiny_llama))
    async with apart(tiny_llama, *flags) as live, live.attached() as attached:
        for alias, tenant in ((1, "a"), (2, "b"), (3, "b")):
            await attached.follow([7, 8, 9], alias=alias, tenant=tenant)
            await attached.commit(*OUTPUT, alias=alias, end=True)
        for tenant in "ab":
            await add_line(live, tenant)
    async with serving(tiny_llama, tmp_path, past=False) as live:
        await live.retrieval.Forget(retrieval_pb2.ForgetRequest(tenant="a"), timeout=100)
        await live.retrieval.Forget(retrieval_pb2.ForgetRequest(tenant="b", session="s2"), timeout=100)
    with closing(PastOutputs(tmp_path / "past")) as past:
        assert past.outputs("tenant a") == []
        assert [session for session, _ in past.outputs("tenant b")] == ["s3#0"]
    assert [kept.tenant for kept in read_manifest(tmp_path / "documents")[2]] == ["tenant b"]


def limit_files(pid: int, size: int) -> None:
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


async def test_documents_beyond_the_room_are_refused_and_others_stay(
    tiny_llama: Path, tmp_path: Path
) -> None:
    flags = ("--embeddings", str(tiny_llama), "--document-tokens-of-tenant", "2000")
    async with apart(tiny_llama, *flags) as live:

        async def add(name: str, count: int, tenant: str = "a") -> Any:
            ids = retrieval_pb2.DocumentIds(ids=[5, 6, 7, 8] * (count // 4))
            document = retrieval_pb2.Document(name=name, ids=ids)
            message = retrieval_pb2.AddDocumentsRequest(tenant=tenant, document=document)
            return await live.retrieval.AddDocuments(iter([message]), timeout=100)

        bare = retrieval_pb2.AddDocumentsRequest(document=retrieval_pb2.Document(name="bare"))
        error = await refused(live.retrieval.AddDocuments(iter([bare]), timeout=100))
        assert (error.code(), "'bare' has neither" in (error.details() or "")) == (
            Code.INVALID_ARGUMENT,
            True,
        )
        assert (await add("one", 1600)).documents == 1
        error = await refused(add("two", 800))
        assert (error.code(), "at most 2000 are kept" in (error.details() or "")) == (
            Code.RESOURCE_EXHAUSTED,
            True,
        )
        assert (await add("one", 2000)).documents == 1, "one of a known name takes the other's place"
        assert (await add("two", 800, tenant="b")).documents == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OSError(errno.ENOSPC, "full"), "Overloaded"),
        (OSError(errno.EIO, "broken"), "DiskFailed"),
        (TimeoutError(), "DiskTooSlow"),
    ],
)
def test_a_disks_errors_are_explained(error: OSError, code: str) -> None:
    with pytest.raises(OutriderError, match="not removed") as raised, explained_disk_errors("not removed"):
        raise error
    assert type(raised.value).__name__ == code
    assert isinstance(raised.value, Overloaded) == (code == "Overloaded")


async def test_another_processs_past_outputs_are_a_reason_not_to_start(
    tiny_llama: Path, tmp_path: Path
) -> None:
    async with serving(tiny_llama, tmp_path):
        with pytest.raises(OutriderError, match="in use by another process"):
            load(RetrievalSettings(tokenizer=str(tiny_llama), folder=str(tmp_path)))
