"""The Retrieval service: lists, builds, loads and forgets what drafts come from, while drafting goes on.

What takes longer than a lookup happens in another thread or process; the worker only takes over the result.
"""

import asyncio
import errno
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import grpc.aio

from outrider.tokens import TokenTable
from outrider.v1 import retrieval_pb2, retrieval_pb2_grpc
from outrider.wire.codec import MAX_NAME, checked_session, checked_tenant
from outrider.wire.incoming.shape import Bounds
from outrider.wire.incoming.unparsed import Unparsed, parsed
from outrider.wire.status import guarded, guarded_unparsed
from retrieval_service.building.builds import Builds, NoTokenizer, Spool, document_ids
from retrieval_service.catalogue import CorpusKey, scope
from retrieval_service.corpus.index import CorpusIndex
from retrieval_service.forgetting import Forgetting
from retrieval_service.loading import Loaded, open_corpus
from retrieval_service.settings import RetrievalSettings
from retrieval_service.turns import Turns, in_thread
from retrieval_service.worker import RetrievalWorker
from speculative.errors import InvalidRequest, OutriderError, Overloaded, Unavailable

if TYPE_CHECKING:
    from retrieval_service.dense.documents import Documents

Context = grpc.aio.ServicerContext[Any, Any]
T = TypeVar("T")

ADDED_AT_ONCE = 256
DOCUMENT_BOUNDS = Bounds(most_bytes=2**31)
"""Bounds of a document; the process's largest message bounds its bytes."""
NAMES_BOUNDS = Bounds(most_bytes=2**31, most_fields=2**17)
"""Bounds of a list of documents' names."""
DOCUMENT_S = 60.0
"""Seconds in which the next document of a stream has to come."""
RETRY_AFTER_S = 60.0
CHANGES_OF_A_TENANT = 2
"""Changes of one tenant's documents that hold a thread at once: each may wait minutes for a large index."""
CHANGES_AT_ONCE = 8
"""Threads for changes of all tenants' documents, and as many again for Forget; other calls use asyncio's."""
DISK_IS_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class NoSuchCorpus(OutriderError):
    """No corpus of this name is loaded, or on disk."""

    code = "NOT_FOUND"


class NoDocuments(OutriderError):
    """The service has neither embeddings nor an encoder to find documents with."""

    code = "FAILED_PRECONDITION"


class DiskFailed(OutriderError):
    """A file could not be written, read or removed."""

    code = "FAILED_PRECONDITION"


class DiskTooSlow(OutriderError):
    """A file was not written in time; it may still be written later."""

    code = "UNAVAILABLE"


@contextmanager
def explained_disk_errors(what: str) -> Iterator[None]:
    """Turns OSErrors about files into errors for the caller; `what` begins their messages."""
    try:
        yield
    except TimeoutError as error:
        raise DiskTooSlow(f"{what}: the disk did not take it in time; ask again") from error
    except OSError as error:
        if error.errno in DISK_IS_FULL:
            raise Overloaded(f"{what}: no room on the disk ({error.strerror})", RETRY_AFTER_S) from error
        raise DiskFailed(f"{what}: {error.strerror or error}") from error


class RetrievalServer(retrieval_pb2_grpc.RetrievalServicer):
    """The Retrieval service, for operators and programs.

    Args:
        ready: the worker and what it runs on; raises Unavailable while indexes are being mapped.
    """

    def __init__(
        self, settings: RetrievalSettings, ready: Callable[[], tuple[RetrievalWorker, Loaded]]
    ) -> None:
        self._settings = settings
        self._ready = ready
        self._builds = Builds(settings.ingest_mb, settings.corpora_mb_of_tenant)
        self._forgetting = Forgetting(settings)
        self._changing: Turns[str] = Turns(CHANGES_OF_A_TENANT, _own_threads("documents"))
        self._forgets: Turns[str] = Turns(CHANGES_OF_A_TENANT, _own_threads("forgetting"))
        """For Forget. It is separate, so that Forget never waits for calls that change documents."""

    @guarded
    async def ListCorpora(
        self, request: retrieval_pb2.ListCorporaRequest, context: Context
    ) -> retrieval_pb2.ListCorporaResponse:
        """Lists the tenant's corpora and the public ones; see retrieval.proto."""
        worker, loaded = self._ready()
        tenant = checked_tenant(request.tenant)
        seen = await _in_worker(worker, lambda: loaded.catalogue.seen_by(tenant))
        return retrieval_pb2.ListCorporaResponse(corpora=[_described(key, index) for key, index in seen])

    @guarded_unparsed
    async def BuildCorpus(
        self,
        requests: AsyncIterator[
            Unparsed[retrieval_pb2.BuildCorpusRequest] | retrieval_pb2.BuildCorpusRequest
        ],
        context: Context,
    ) -> retrieval_pb2.Corpus:
        """Builds a corpus of the documents of this stream, then drafts from it; see retrieval.proto."""
        worker, loaded = self._ready()
        messages = in_time(requests)
        first = await anext(messages, None)
        named = None if first is None else await parsed(first)
        if named is None or not named.HasField("start"):
            raise InvalidRequest("the first message must be `start`")
        key = _key(named.start)
        tokens = _tokens(loaded)
        path = loaded.store.path(key)
        with (
            self._builds.building(path),
            self._builds.room(key.owner) as room,
            explained_disk_errors(f"corpus {key} is not built"),
        ):
            await self._builds.check_room(path)  # before documents are taken in vain
            async with Spool(loaded.store.root, tokens, room) as spool:
                async for message in messages:
                    await asyncio.to_thread(spool.add, await parsed(message, DOCUMENT_BOUNDS))
                await self._builds.run(path, spool, key.owner)
                return await self._add(worker, loaded, key)

    @guarded
    async def LoadCorpus(
        self, request: retrieval_pb2.LoadCorpusRequest, context: Context
    ) -> retrieval_pb2.Corpus:
        """Loads a corpus that lies in the worker's folder; see retrieval.proto."""
        worker, loaded = self._ready()
        return await self._add(worker, loaded, _key(request.name))

    @guarded
    async def UnloadCorpus(
        self, request: retrieval_pb2.UnloadCorpusRequest, context: Context
    ) -> retrieval_pb2.UnloadCorpusResponse:
        """Stops drafting from a corpus, and deletes its files on request; see retrieval.proto."""
        worker, loaded = self._ready()
        key = _key(request.name)
        if not request.remove:
            found = await _in_worker(worker, lambda: loaded.catalogue.remove(key))
        else:
            path = loaded.store.path(key)
            with self._builds.building(path):
                async with self._builds.loading(path):
                    found = await _in_worker(worker, lambda: loaded.catalogue.remove(key))
                    # A damaged corpus could not be loaded, and is removed all the same.
                    found = await in_thread(loaded.store.remove, key) or found
        if not found:
            raise NoSuchCorpus(f"no corpus {key} is {'there' if request.remove else 'loaded'}")
        return retrieval_pb2.UnloadCorpusResponse()

    @guarded_unparsed
    async def AddDocuments(
        self,
        requests: AsyncIterator[
            Unparsed[retrieval_pb2.AddDocumentsRequest] | retrieval_pb2.AddDocumentsRequest
        ],
        context: Context,
    ) -> retrieval_pb2.AddDocumentsResponse:
        """Adds or replaces documents of the tenant; see retrieval.proto."""
        _, loaded = self._ready()
        documents = _documents(loaded)
        tenant: str | None = None
        group: list[tuple[str, Sequence[int]]] = []
        count = brought = 0
        try:
            async for request in in_time(requests):
                message = await parsed(request, DOCUMENT_BOUNDS)
                tenant = checked_tenant(message.tenant) if tenant is None else tenant
                name = _document_name(message.document.name)
                ids = await asyncio.to_thread(_named_ids, message, loaded)
                brought += documents.charged(ids)
                _check_brought(brought, self._settings.document_tokens_of_tenant)
                group.append((name, ids))
                if len(group) >= ADDED_AT_ONCE:
                    count = await self._change(tenant, documents.add, group)
                    group = []
            if tenant is None:
                raise InvalidRequest("there is no document: the stream has no message")
            if group:
                count = await self._change(tenant, documents.add, group)
        finally:
            # One write for all documents.
            if tenant is not None:
                with explained_disk_errors("added in memory, not yet on the disk"):
                    await self._change(tenant, documents.save)
        return retrieval_pb2.AddDocumentsResponse(documents=count)

    @guarded_unparsed
    async def RemoveDocuments(
        self,
        request: Unparsed[retrieval_pb2.RemoveDocumentsRequest] | retrieval_pb2.RemoveDocumentsRequest,
        context: Context,
    ) -> retrieval_pb2.RemoveDocumentsResponse:
        """Removes documents of the tenant; see retrieval.proto."""
        _, loaded = self._ready()
        documents = _documents(loaded)
        asked = await parsed(request, NAMES_BOUNDS)
        tenant = checked_tenant(asked.tenant)
        with explained_disk_errors("removed in memory, not yet on the disk"):
            removed = await self._change(tenant, documents.remove, tuple(asked.names))
        return retrieval_pb2.RemoveDocumentsResponse(removed=removed)

    @guarded
    async def ExportPast(
        self, request: retrieval_pb2.ExportPastRequest, context: Context
    ) -> AsyncIterator[retrieval_pb2.ExportPastResponse]:
        """Returns a tenant's past outputs; see retrieval.proto."""
        _, loaded = self._ready()
        tenant = checked_tenant(request.tenant)
        past = loaded.past
        outputs = [] if past is None else await asyncio.to_thread(past.outputs, scope(tenant))
        digest = "" if loaded.tokens is None else loaded.tokens.digest
        yield retrieval_pb2.ExportPastResponse(outputs=len(outputs), tokenizer_digest=digest)
        for session, ids in outputs:
            output = retrieval_pb2.PastOutput(session=session, ids=ids)
            yield retrieval_pb2.ExportPastResponse(output=output)

    @guarded
    async def Forget(
        self, request: retrieval_pb2.ForgetRequest, context: Context
    ) -> retrieval_pb2.ForgetResponse:
        """Removes the past output of a session, or all that a tenant brought; see retrieval.proto.

        Running sessions of theirs are no longer added to past outputs.
        """
        worker, loaded = self._ready()
        tenant = checked_tenant(request.tenant)
        session = checked_session(request.session) if request.session else None
        await _in_worker(worker, lambda: worker.unlearn(tenant, session))
        with explained_disk_errors("forgotten in memory, not yet on the disk"):
            if session is None:
                await self._forgets.run_in_thread(tenant, self._forgetting.tenant, loaded, tenant)
            else:
                await self._forgets.run_in_thread(tenant, self._forgetting.session, loaded, tenant, session)
        return retrieval_pb2.ForgetResponse()

    @guarded
    async def Stats(
        self, request: retrieval_pb2.StatsRequest, context: Context
    ) -> retrieval_pb2.StatsResponse:
        """Returns what the worker holds, of all tenants together; see retrieval.proto."""
        worker, _ = self._ready()
        held = await _in_worker(worker, worker.gauges)
        return retrieval_pb2.StatsResponse(**{name: int(count) for name, count in held.items()})

    async def _change(self, tenant: str, change: Callable[..., T], *given: object) -> T:
        """Changes a tenant's documents in a thread, when it is this call's turn among the tenant's."""
        return await self._changing.run_in_thread(tenant, change, scope(tenant), *given)

    async def _add(self, worker: RetrievalWorker, loaded: Loaded, key: CorpusKey) -> retrieval_pb2.Corpus:
        """Maps a corpus of the service's folder and adds it. Raises CorpusError, InvalidRequest."""
        path = loaded.store.path(key)
        async with self._builds.loading(path):
            index = await in_thread(open_corpus, path, loaded.tokens)
            await _in_worker(worker, lambda: loaded.catalogue.add(key, index))
        return _described(key, index)


async def in_time(requests: AsyncIterator[T]) -> AsyncIterator[T]:
    """The messages of a stream. Raises Unavailable where the caller sends none for DOCUMENT_S."""
    arriving = aiter(requests)
    while True:
        try:
            async with asyncio.timeout(DOCUMENT_S):
                message = await anext(arriving)
        except StopAsyncIteration:
            return
        except TimeoutError as error:
            raise Unavailable(
                f"no message came for {DOCUMENT_S:.0f} s: end the stream behind the last document"
            ) from error
        yield message


def _check_brought(tokens: int, most: int) -> None:
    if tokens > most:
        raise Overloaded(
            f"one call brings more than {most} tokens of documents, all that a tenant may have "
            "(document_tokens_of_tenant)",
            RETRY_AFTER_S,
        )


async def _in_worker(worker: RetrievalWorker, work: Callable[[], T]) -> T:
    return await asyncio.wrap_future(worker.call(work))


def _own_threads(name: str) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(CHANGES_AT_ONCE, thread_name_prefix=name)


def _key(name: retrieval_pb2.CorpusName) -> CorpusKey:
    if name.public and name.tenant:
        raise InvalidRequest(f"a corpus is public or tenant {name.tenant!r}'s, not both")
    return CorpusKey(None if name.public else checked_tenant(name.tenant), name.name)


def _described(key: CorpusKey, index: CorpusIndex) -> retrieval_pb2.Corpus:
    header = index.header
    return retrieval_pb2.Corpus(
        name=retrieval_pb2.CorpusName(name=key.name, tenant=key.owner or "", public=key.owner is None),
        tokens=header.tokens,
        documents=header.documents,
        bytes=header.size,
    )


def _tokens(loaded: Loaded) -> TokenTable:
    if loaded.tokens is None:
        raise NoTokenizer("this service has no tokenizer; start it with --tokenizer PATH")
    return loaded.tokens


def _documents(loaded: Loaded) -> "Documents":
    if loaded.documents is None:
        raise NoDocuments(loaded.no_documents)
    return loaded.documents


def _document_name(name: str) -> str:
    if not 1 <= len(name) <= MAX_NAME or not name.isprintable():
        raise InvalidRequest(
            f"a document's name is {name[:MAX_NAME]!r}; give 1 to {MAX_NAME} printable characters"
        )
    return name


def _named_ids(message: retrieval_pb2.AddDocumentsRequest, loaded: Loaded) -> Sequence[int]:
    if message.document.HasField("ids"):
        return document_ids(message.document.ids, loaded.tokens)
    if not message.document.HasField("text"):
        raise InvalidRequest(f"document {message.document.name!r} has neither `text` nor `ids`; give one")
    if not message.document.text:
        raise InvalidRequest(f"document {message.document.name!r} has no text")
    return _tokens(loaded).encode(message.document.text)
