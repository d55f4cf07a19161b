"""The folder of corpora that clients build; knows nothing of the corpora's contents."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from outrider.wire.names import checked_corpus_name
from retrieval_service.catalogue import CorpusKey
from retrieval_service.corpus.errors import NoCorpus
from retrieval_service.corpus.layout import HEADER
from retrieval_service.corpus.manage import remove
from speculative.errors import InvalidRequest, OutriderError


class NoFolder(OutriderError):
    """The service has no folder for corpora."""

    code = "FAILED_PRECONDITION"


class CorpusStore:
    """A folder of corpora: everybody's by name, a tenant's below the digest of the tenant's name."""

    def __init__(self, root: Path | None) -> None:
        self._root = root

    @property
    def root(self) -> Path:
        """The folder. Raises NoFolder if the service has none."""
        if self._root is None:
            raise NoFolder("this service has no folder to keep corpora in; start it with --folder PATH")
        return self._root

    def path(self, key: CorpusKey) -> Path:
        """The path of a corpus, existing or not. Raises InvalidRequest for a bad name, or NoFolder."""
        if key.owner == "":
            raise InvalidRequest("a corpus of the tenant '' would be nobody's: name a tenant, or say public")
        name = checked_corpus_name(key.name)
        return self.root / ("public" if key.owner is None else _digest(key.owner)) / name

    def paths(self) -> Iterator[Path]:
        """Paths of all complete corpora; none without a folder."""
        if self._root is not None:
            yield from sorted(header.parent for header in self._root.glob(f"*/*/{HEADER}"))

    def remove(self, key: CorpusKey) -> bool:
        """Deletes a corpus' files, complete or not; False if there are none. Raises CorpusError.

        Processes that have the corpus mapped keep it until they unmap it.
        """
        try:
            remove(self.path(key))
        except NoCorpus:
            return False
        return True


def _digest(tenant: str) -> str:
    return f"tenant-{hashlib.sha256(tenant.encode()).hexdigest()[:32]}"
