"""Documents over real gRPC: a tenant whose index takes long leaves threads to the others."""

import asyncio
import threading
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import pytest
from numpy.typing import NDArray

from outrider.v1 import retrieval_pb2, retrieval_pb2_grpc
from outrider.wire.channel import open_channel
from outrider.wire.incoming.unparsed import unparsed
from retrieval_service.catalogue import Catalogue, scope
from retrieval_service.dense.documents import DocumentLimits, Documents
from retrieval_service.dense.embeddings import TableEmbedder
from retrieval_service.dense.index import Kind, VectorIndex
from retrieval_service.loading import Loaded
from retrieval_service.server import RetrievalServer
from retrieval_service.settings import RetrievalSettings
from retrieval_service.store import CorpusStore

WAIT_S = 60.0
MORE_THAN_THREADS = 33
"""asyncio has 32 threads at most."""


async def test_calls_of_a_tenant_whose_index_is_built_anew_leave_threads_to_the_others(
    embedder: TableEmbedder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    building, go_on = threading.Event(), threading.Event()
    build = VectorIndex.build

    def slow(vectors: NDArray[np.floating[Any]], kind: Kind) -> VectorIndex:
        building.set()
        assert go_on.wait(WAIT_S)
        return build(vectors, kind)

    documents = Documents(embedder, "", tmp_path, DocumentLimits(10**6, 10**6))
    for owner in ("a", "b"):
        documents.add(scope(owner), [("first", [1] * 9), ("second", [2] * 9)])
        documents.save(scope(owner))
    loaded = Loaded(None, Catalogue(), CorpusStore(None), None, documents)
    no_worker: Any = None
    served = RetrievalServer(RetrievalSettings(), lambda: (no_worker, loaded))
    server = grpc.aio.server()
    retrieval_pb2_grpc.add_RetrievalServicer_to_server(served, unparsed(server))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"

    def ids(number: int) -> retrieval_pb2.Document:
        return retrieval_pb2.Document(name=f"{number}", ids=retrieval_pb2.DocumentIds(ids=[number] * 9))

    async with AsyncExitStack() as stack:
        stack.callback(documents.close)
        await server.start()
        stack.push_async_callback(server.stop, 0)
        channel = await stack.enter_async_context(open_channel(address))
        stub: Any = retrieval_pb2_grpc.RetrievalStub(channel)

        def add(tenant: str, number: int) -> Any:
            message = retrieval_pb2.AddDocumentsRequest(tenant=tenant, document=ids(number))
            return stub.AddDocuments(iter([message]), timeout=WAIT_S)

        def remove(tenant: str, name: str) -> Any:
            message = retrieval_pb2.RemoveDocumentsRequest(tenant=tenant, names=[name])
            return stub.RemoveDocuments(message, timeout=WAIT_S)

        monkeypatch.setattr(VectorIndex, "build", slow)
        try:
            calls = [remove("a", "first")]
            assert await asyncio.to_thread(building.wait, WAIT_S)
            calls += [add("a", number) for number in range(MORE_THAN_THREADS)]
            calls += [remove("a", "none") for _ in range(MORE_THAN_THREADS)]
            assert (await asyncio.wait_for(add("b", 1), WAIT_S / 4)).documents == 3
        finally:
            go_on.set()
        await asyncio.gather(*calls)
