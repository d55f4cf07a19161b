"""Opens everything that the settings name: the tokenizer, corpora, past outputs, documents."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.compiling.library_builder import LibraryBuilder
from outrider.tokens import TokenTable, split_revision
from retrieval_service.building.builds import remove_left
from retrieval_service.catalogue import Catalogue, CorpusKey
from retrieval_service.corpus.errors import CorpusError
from retrieval_service.corpus.index import CorpusIndex
from retrieval_service.past.compiled_index import find_library
from retrieval_service.past.outputs import Limits, PastOutputs
from retrieval_service.settings import RetrievalSettings
from retrieval_service.store import CorpusStore
from speculative.errors import InvalidRequest, OutriderError

if TYPE_CHECKING:
    from retrieval_service.dense.documents import Documents
    from retrieval_service.dense.embeddings import Embedder
    from retrieval_service.dense.remote import EmbeddingsServer

log = logging.getLogger(__name__)

TOKENIZER = "tokenizer.json"
NO_EMBEDDINGS = (
    "this service has nothing to find documents with; start it with --embeddings PATH or --embeddings-url URL"
)


class CannotLoad(OutriderError):
    """A tokenizer, corpus or memory that the settings name cannot be opened."""

    code = "FAILED_PRECONDITION"


@dataclass(frozen=True, slots=True)
class Loaded:
    """The tokenizer and memories that the settings name, opened."""

    tokens: TokenTable | None
    catalogue: Catalogue
    store: CorpusStore
    past: PastOutputs | None
    documents: "Documents | None"
    embeddings: "EmbeddingsServer | None" = None
    """The server that embeds documents, if the settings name one."""
    no_documents: str = NO_EMBEDDINGS
    """Why there are no documents, where there are none."""
    index_builder: LibraryBuilder | None = None
    """Compiles the index of past outputs beside the worker."""

    def close(self) -> None:
        """Writes past outputs and documents, and ends the search. The worker closes the corpora."""
        if self.index_builder is not None:
            self.index_builder.close()
        if self.embeddings is not None:
            self.embeddings.close()
        if self.past is not None:
            self.past.close()
        if self.documents is not None:  # last, since it waits for changes, which may take minutes
            self.documents.close()


def load(settings: RetrievalSettings) -> Loaded:
    """Opens what the settings name. Raises OutriderError if any of it cannot be used.

    A corpus of the service's own folder that is damaged, or another tokenizer's, is left out and logged; so
    are all of them where the service has no tokenizer.
    """
    tokens = read_tokens(settings.tokenizer)
    store = CorpusStore(settings.below("corpora"))
    named = _by_key([open_corpus(Path(path).expanduser(), tokens) for path in settings.corpus])
    near = _near_documents(settings, tokens)
    documents = near.documents
    past = None
    if settings.past:
        try:
            past = PastOutputs(settings.below("past"), past_limits(settings))
        except OSError as error:
            raise CannotLoad(f"past outputs: {error}") from error
    catalogue = Catalogue(past, None if documents is None else documents.near)
    if settings.folder:
        remove_left(store.root)
    for path in store.paths():
        try:
            index = open_corpus(path, tokens)
        except (CorpusError, InvalidRequest) as error:
            log.error("corpus left out: %s", error)
        else:
            catalogue.add(CorpusKey(index.header.tenant, path.name), index)
    for key, index in named.items():
        catalogue.add(key, index)
    builder = None if past is None else _index_builder(past, settings.cache_dir)
    return Loaded(tokens, catalogue, store, past, documents, near.server, near.without, builder)


def past_limits(settings: RetrievalSettings) -> Limits:
    """Bounds of past outputs, as the settings give them."""
    return Limits(tenant_tokens=settings.past_tokens_of_tenant, total_tokens=settings.past_tokens)


def _index_builder(past: PastOutputs, cache_dir: Path | None) -> LibraryBuilder:
    """A builder, which has started, of the compiled index: past outputs use it as soon as it is there."""

    def use(folder: Path, is_stopped: Callable[[], bool], compiles: bool) -> bool:
        try:
            library = find_library(folder, is_stopped, compiles)
            if library is not None:
                past.use(library)
        except Exception as error:  # whatever it is, the Python index goes on
            if compiles and not is_stopped():
                log.info("past outputs are indexed in Python: %s", error)
            return False
        return library is not None

    builder = LibraryBuilder(cache_dir, use)
    builder.start()
    return builder


@dataclass(frozen=True, slots=True)
class _NearDocuments:
    """Documents with the server that embeds them, or the reason why there are none."""

    documents: "Documents | None" = None
    server: "EmbeddingsServer | None" = None
    without: str = NO_EMBEDDINGS


def _near_documents(settings: RetrievalSettings, tokens: TokenTable | None) -> _NearDocuments:
    """Documents, if the settings name any embeddings. Raises OutriderError.

    Drafts of all other kinds need no embeddings: without a table of a known name, and while a server does not
    answer, there are no documents.
    """
    if not settings.embeddings and not settings.embeddings_url:
        return _NearDocuments()
    from retrieval_service.dense.documents import DocumentLimits, Documents  # FAISS, which nothing else needs
    from retrieval_service.dense.errors import EmbeddingsFailed, NoEmbeddingTable
    from retrieval_service.dense.remote import EmbeddingsServer

    limits = DocumentLimits(settings.document_tokens, settings.document_tokens_of_tenant)
    folder, digest = settings.below("documents"), "" if tokens is None else tokens.digest
    try:
        embedder = _embedder(settings, tokens)
        server = embedder if isinstance(embedder, EmbeddingsServer) else None
        return _NearDocuments(Documents(embedder, digest, folder, limits), server)
    except (NoEmbeddingTable, EmbeddingsFailed) as error:
        log.warning("the worker has no documents: %s", error)
        return _NearDocuments(without=f"this service started without documents: {error}")
    except OSError as error:
        raise CannotLoad(f"documents: {error}") from error


def _embedder(settings: RetrievalSettings, tokens: TokenTable | None) -> "Embedder":
    """The embedder that the settings name. Raises OutriderError."""
    from retrieval_service.dense.embeddings import TableEmbedder
    from retrieval_service.dense.remote import EmbeddingsServer

    if not settings.embeddings_url:
        return TableEmbedder.read(Path(settings.embeddings).expanduser())
    if tokens is None:
        raise InvalidRequest(
            "an embeddings server reads text, which needs the target's own tokenizer; give --tokenizer"
        )
    key = settings.embeddings_key
    return EmbeddingsServer(
        settings.embeddings_url.get_secret_value(),
        tokens,
        model=settings.embeddings_model,
        key=None if key is None else key.get_secret_value(),
        deadline_s=settings.embeddings_deadline_s,
    )


def _by_key(named: Sequence[CorpusIndex]) -> dict[CorpusKey, CorpusIndex]:
    """Corpora by owner and the names of their folders. Raises CannotLoad if two have the same name."""
    found: dict[CorpusKey, CorpusIndex] = {}
    for index in named:
        key = CorpusKey(index.header.tenant, index.path.resolve().name)
        if key in found:
            raise CannotLoad(
                f"two corpora would be called {key}, after their folders: {found[key].path} and {index.path};"
                " rename one"
            )
        found[key] = index
    return found


def open_corpus(path: Path, tokens: TokenTable | None) -> CorpusIndex:
    """Maps a corpus. Raises CorpusError, and InvalidRequest if the service has no tokenizer."""
    if tokens is None:
        raise InvalidRequest(f"{path}: a corpus needs the target's own tokenizer; give --tokenizer")
    return CorpusIndex.open(path, tokens.digest)


def read_tokens(name: str) -> TokenTable | None:
    """Token table of a tokenizer.json, a folder with one, or a NAME or NAME@REVISION; None for no name."""
    if not name:
        return None
    path: Path = Path(name).expanduser()
    try:
        if path.is_dir():
            path = path / TOKENIZER
        elif not path.exists() and not name.startswith(("/", ".", "~")):
            from huggingface_hub import hf_hub_download

            bare, revision = split_revision(name)
            path = Path(hf_hub_download(bare, TOKENIZER, revision=revision))
        return TokenTable.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # errors of the Hugging Face hub are OSErrors
        raise CannotLoad(f"no tokenizer at {name!r}: {error}") from error
