"""Opens everything that the settings name: the tokenizer, corpora, past outputs, references."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.tokens import TokenTable, split_revision
from retrieval_service.corpus.errors import CorpusError
from retrieval_service.corpus.index import CorpusIndex
from retrieval_service.holdings import CorpusKey, Holdings
from retrieval_service.past.outputs import Limits, PastOutputs
from retrieval_service.settings import RetrievalSettings
from retrieval_service.store import CorpusStore
from speculative.errors import InvalidRequest, OutriderError

if TYPE_CHECKING:
    from retrieval_service.documents import Documents

log = logging.getLogger(__name__)

TOKENIZER = "tokenizer.json"


class CannotLoad(OutriderError):
    """Something that the settings name cannot be had."""

    code = "FAILED_PRECONDITION"


@dataclass(frozen=True, slots=True)
class Loaded:
    """What the service runs on."""

    tokens: TokenTable | None
    holdings: Holdings
    store: CorpusStore
    past: PastOutputs | None
    documents: "Documents | None"

    def close(self) -> None:
        """Writes what is to last; corpora are the engine's to close."""
        if self.documents is not None:
            self.documents.close()
        if self.past is not None:
            self.past.close()


def load(settings: RetrievalSettings) -> Loaded:
    """Raises OutriderError where something that is named cannot be used.

    A corpus of the service's own folder that is damaged, or another tokenizer's, is left out and logged.
    """
    tokens = read_tokens(settings.tokenizer)
    digest = "" if tokens is None else tokens.digest
    store = CorpusStore(settings.below("corpora"))
    named = [open_corpus(Path(path).expanduser(), tokens) for path in settings.corpus]
    documents = None
    if settings.embeddings:
        from retrieval_service.documents import Documents  # FAISS, which nothing else needs

        documents = Documents(Path(settings.embeddings), digest, settings.below("references"))
    past = None
    if settings.past:
        try:
            limits = Limits(tenant_tokens=settings.past_tokens_of_tenant, total_tokens=settings.past_tokens)
            past = PastOutputs(settings.below("past"), limits)
        except OSError as error:
            raise CannotLoad(f"past outputs: {error}") from error
    holdings = Holdings(past, documents)
    for path in store.paths():
        try:
            index = open_corpus(path, tokens)
        except CorpusError as error:
            log.error("corpus left out: %s", error)
        else:
            holdings.add(CorpusKey(index.header.tenant, path.name), index)
    for given, index in zip(settings.corpus, named, strict=True):
        holdings.add(CorpusKey(index.header.tenant, Path(given).name), index)
    return Loaded(tokens, holdings, store, past, documents)


def open_corpus(path: Path, tokens: TokenTable | None) -> CorpusIndex:
    """Maps it. Raises CorpusError, and InvalidRequest where this service has no tokenizer."""
    if tokens is None:
        raise InvalidRequest(f"{path}: a corpus needs the target's own tokenizer; give --tokenizer")
    return CorpusIndex.open(path, tokens.digest)


def read_tokens(name: str) -> TokenTable | None:
    """From a tokenizer.json, a folder that has one, or an id, NAME or NAME@REVISION; None for no name."""
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
    except (OSError, ValueError) as error:  # those of the hub are OSErrors
        raise CannotLoad(f"no tokenizer at {name!r}: {error}") from error
