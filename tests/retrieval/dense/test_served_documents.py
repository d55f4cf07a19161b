"""Documents over real gRPC: an index that takes long, calls that are given up, and other tenants."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from outrider.v1 import retrieval_pb2, retrieval_pb2_grpc
from outrider.wire.channel import open_channel
from outrider.wire.incoming.unparsed import unparsed
from retrieval_service.catalogue import Catalogue, scope
from retrieval_service.dense.documents import DocumentLimits, Documents
from retrieval_service.dense.embeddings import TableEmbedder
from retrieval_service.dense.index import VectorIndex
from retrieval_service.dense.library import DocumentLibrary
from retrieval_service.dense.storage import write_scope
from retrieval_service.loading import Loaded
from retrieval_service.server import CHANGES_AT_ONCE, RetrievalServer
from retrieval_service.settings import RetrievalSettings
from retrieval_service.store import CorpusStore
from tests.in_time import in_time
from tests.retrieval.dense.held import Held

WAIT_S = 60.0
MORE_THAN_THREADS = 33
"""asyncio has 32 threads at most."""
GIVEN_UP_S = 0.3


class NoSessions:
    """A worker that follows no session."""

    def call(self, work: Callable[[], object]) -> "Future[object]":
        done: Future[object] = Future()
        done.set_result(work())
        return done

    def unlearn(self, tenant: str, session: str | None) -> None:
        pass


class Client:
    """Calls a server of documents; each tenant has the documents "first" and "second"."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub: Any = retrieval_pb2_grpc.RetrievalStub(channel)

    def add(self, tenant: str, number: int) -> Any:
        document = retrieval_pb2.Document(name=f"{number}", ids=retrieval_pb2.DocumentIds(ids=[number] * 9))
        message = retrieval_pb2.AddDocumentsRequest(tenant=tenant, document=document)
        return self._stub.AddDocuments(iter([message]), timeout=WAIT_S)

    def remove(self, tenant: str, name: str, timeout: float = WAIT_S) -> Any:
        message = retrieval_pb2.RemoveDocumentsRequest(tenant=tenant, names=[name])
        return self._stub.RemoveDocuments(message, timeout=timeout)

    def forget(self, tenant: str, timeout: float = WAIT_S) -> Any:
        return self._stub.Forget(retrieval_pb2.ForgetRequest(tenant=tenant), timeout=timeout)


@pytest.fixture
def slow_builds(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Held]]:
    """Holds up builds of indexes from its call on."""
    made: list[Held] = []

    def begin() -> Held:
        made.append(Held(VectorIndex.build))
        monkeypatch.setattr(VectorIndex, "build", made[-1])
        return made[-1]

    yield begin
    for slow in made:
        slow.go_on.set()


@pytest.fixture
async def client(embedder: TableEmbedder, tmp_path: Path) -> AsyncIterator[Client]:
    documents = Documents(embedder, "", tmp_path, DocumentLimits(10**6, 10**6))
    for owner in ("a", "b"):
        documents.add(scope(owner), [("first", [1] * 9), ("second", [2] * 9)])
        documents.save(scope(owner))
    loaded = Loaded(None, Catalogue(), CorpusStore(None), None, documents)
    worker: Any = NoSessions()
    served = RetrievalServer(RetrievalSettings(), lambda: (worker, loaded))
    server = grpc.aio.server()
    retrieval_pb2_grpc.add_RetrievalServicer_to_server(served, unparsed(server))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    async with AsyncExitStack() as stack:
        stack.push_async_callback(asyncio.to_thread, documents.close)
        await server.start()
        stack.push_async_callback(server.stop, 0)
        yield Client(await stack.enter_async_context(open_channel(address)))


async def cancelled(call: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_calls_of_a_tenant_whose_index_is_built_anew_leave_threads_to_the_others(
    client: Client, slow_builds: Callable[[], Held]
) -> None:
    slow = slow_builds()
    calls = [client.remove("a", "first")]
    assert await asyncio.to_thread(slow.begun.wait, WAIT_S)
    calls += [client.add("a", number) for number in range(MORE_THAN_THREADS)]
    calls += [client.remove("a", "none") for _ in range(MORE_THAN_THREADS)]
    assert (await asyncio.wait_for(client.add("b", 1), WAIT_S / 4)).documents == 3
    slow.go_on.set()
    await asyncio.gather(*calls)


async def test_changes_that_take_long_leave_threads_to_calls_that_do_not(
    client: Client, slow_builds: Callable[[], Held]
) -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    slow = slow_builds()
    removing = asyncio.ensure_future(client.remove("a", "first"))
    in_time(await asyncio.get_running_loop().run_in_executor(ThreadPoolExecutor(1), slow.begun.wait, WAIT_S))
    assert (await asyncio.wait_for(client.add("b", 1), WAIT_S / 4)).documents == 3
    slow.go_on.set()
    assert (await removing).removed == 1


async def test_calls_that_are_given_up_leave_threads_to_the_others(
    client: Client, slow_builds: Callable[[], Held]
) -> None:
    slow = slow_builds()
    for _ in range(CHANGES_AT_ONCE):  # one after another, as if somebody tried again
        await cancelled(client.remove("a", "first", timeout=GIVEN_UP_S))
    in_time(slow.begun.is_set(), "no removal began before it was given up")
    assert (await asyncio.wait_for(client.add("b", 1), WAIT_S / 4)).documents == 3
    slow.go_on.set()
    assert (await client.remove("a", "second")).removed == 1


async def test_forgetting_that_is_given_up_leaves_threads_to_the_others(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Held(write_scope)
    with monkeypatch.context() as slowly:
        slowly.setattr("retrieval_service.dense.saving.write_scope", write)
        adding = asyncio.ensure_future(client.add("a", 1))
        assert await asyncio.to_thread(write.begun.wait, WAIT_S)
    try:
        for _ in range(CHANGES_AT_ONCE):  # each waits until the files are written, which it then removes
            await cancelled(client.forget("a", timeout=GIVEN_UP_S))
        await asyncio.wait_for(client.forget("b"), WAIT_S / 4)
    finally:
        write.go_on.set()
    await adding
    await client.forget("a")
    assert (await client.remove("a", "first")).removed == 0


async def test_a_removal_that_was_given_up_is_saved(
    client: Client,
    slow_builds: Callable[[], Held],
    embedder: TableEmbedder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    saved, save = threading.Event(), DocumentLibrary.save

    def told(*given: Any, **named: Any) -> None:
        save(*given, **named)
        saved.set()

    monkeypatch.setattr(DocumentLibrary, "save", told)
    slow = slow_builds()
    await cancelled(client.remove("a", "first", timeout=GIVEN_UP_S))
    in_time(slow.begun.is_set(), "the removal did not begin before it was given up")
    slow.go_on.set()
    assert await asyncio.to_thread(saved.wait, WAIT_S / 4), "nothing was saved"
    left = DocumentLibrary.load(tmp_path, embedder, "").documents(scope("a"))
    assert [one.name for one in left] == ["second"]
