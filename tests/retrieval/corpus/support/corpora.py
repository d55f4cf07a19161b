"""Documents of plain ids as a source of builds, so that tests say what is in a corpus."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from retrieval_service.corpus.build import build
from retrieval_service.corpus.disk import Disk
from retrieval_service.corpus.encoding import StoredDocuments
from retrieval_service.corpus.layout import read_header
from retrieval_service.corpus.plan import Built, CorpusSettings

Ids = npt.NDArray[np.uint32]
DIGEST = "d" * 64


class Unsynced(Disk):
    """Leaves out the syncs, which take most of a small build's time and show only at a loss of power."""

    def sync(self, file: BinaryIO) -> None:
        pass

    def sync_folder(self, path: Path) -> None:
        pass


class Documents:
    """Documents of token ids as a DocumentSource."""

    def __init__(
        self, documents: Sequence[Sequence[int]], name: str = "documents", again: bool = True
    ) -> None:
        self.name, self.again = name, again
        self.documents = documents
        self.left_out: Counter[str] = Counter()
        self.encoded = 0

    def __iter__(self) -> Iterator[Ids]:
        return (np.array(document, dtype=np.uint32) for document in self.documents)

    def encode(self, documents: Sequence[Ids]) -> list[Ids | None]:
        self.encoded += len(documents)
        return list(documents)

    def raw(self, document: Ids) -> bytes:
        return document.tobytes()


def make_corpus(
    folder: Path,
    documents: Sequence[Sequence[int]] | Documents,
    *,
    vocabulary: int = 50,
    shard_tokens: int = 1000,
    tenant: str | None = None,
    digest: str = DIGEST,
    disk: Disk | None = None,
) -> Built:
    source = documents if isinstance(documents, Documents) else Documents(documents)
    return build(
        folder, CorpusSettings(digest, vocabulary, tenant, shard_tokens), source, disk=disk or Unsynced()
    )


def documents_in(folder: Path) -> list[list[int]]:
    """The documents of a corpus, in order."""
    return [ids.tolist() for ids in StoredDocuments([(folder, read_header(folder))])]
