"""The memories that drafts come from: corpora by owner and name, past outputs, documents; who may see which.

No tenant sees what another one owns. Changed and read by the worker's thread alone; each memory may be
written to from other threads.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from outrider.source.events import NotFollowed
from outrider.wire.codec import SessionKey
from retrieval_service.corpus.index import Corpora, CorpusIndex
from retrieval_service.trie import Memory
from speculative.errors import InvalidRequest

CORPUS, PAST, DENSE = NAMES = ("corpus", "past", "dense")
"""Names of the memories that a session can draft from; usage and metrics count each by itself."""
_CACHED_SELECTIONS = 1024


class PastMemory(Protocol):
    """Past outputs of all tenants, by `scope`; the part of `PastOutputs` that this service uses."""

    def extend(self, tenant: str, session: str, ids: Sequence[int]) -> bool:
        """Takes the ids that a session generated next; returns whether they are kept."""

    def finish(self, tenant: str, session: str) -> None:
        """Ends a session's text: the session is over, or continues at another source."""

    def memory(self, tenant: str) -> Memory:
        """The past outputs that this tenant's sessions draft from."""

    def stats(self) -> "PastStats":
        """Counts of the past outputs held."""


class PastStats(Protocol):
    """The counts of past outputs that the service reports."""

    @property
    def tokens(self) -> int:
        """Number of tokens held, of all tenants."""


class NearMemory(Protocol):
    """The near documents of all sessions; the part of `NearDocuments` that this service uses."""

    def follow(self, session: Hashable, tenant: str, ids: Sequence[int]) -> Memory:
        """Starts the search for documents; returns the memory that this session's lookups use."""

    def progress(self, session: Hashable, ids: Sequence[int]) -> None:
        """Takes in all ids that a session has now."""

    def end(self, session: Hashable) -> None:
        """Frees what is held for a session that is over."""

    @property
    def count(self) -> int:
        """Number of documents, of all tenants."""


@dataclass(frozen=True, slots=True)
class CorpusKey:
    """A corpus' owner and its name among the owner's corpora."""

    owner: str | None
    """The tenant; None: everybody's."""
    name: str

    def __str__(self) -> str:
        return f"{self.name!r} of {'everybody' if self.owner is None else f'tenant {self.owner!r}'}"


class Catalogue:
    """All memories of this service."""

    def __init__(self, past: PastMemory | None = None, near: NearMemory | None = None) -> None:
        self.past = past
        self.near = near
        self._corpora: dict[str | None, dict[str, CorpusIndex]] = {}
        self._selected: dict[tuple[str, tuple[str, ...]], Corpora] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the memories that this service can draft from."""
        return (CORPUS, *[PAST] * (self.past is not None), *[DENSE] * (self.near is not None))

    def __iter__(self) -> Iterator[tuple[CorpusKey, CorpusIndex]]:
        for owner, corpora in list(self._corpora.items()):
            for name, index in list(corpora.items()):
                yield CorpusKey(owner, name), index

    def add(self, key: CorpusKey, index: CorpusIndex) -> None:
        """Adds a corpus to draft from, in place of the one of that name.

        Raises InvalidRequest if the corpus has another owner than the key says.
        """
        if index.header.tenant != key.owner:
            raise InvalidRequest(f"corpus {key}: its files belong to {index.header.tenant or 'everybody'}")
        before = self._corpora.setdefault(key.owner, {}).get(key.name)
        self._corpora[key.owner][key.name] = index
        self._changed(before)

    def remove(self, key: CorpusKey) -> bool:
        """Stops drafting from a corpus; returns whether there was one."""
        before = self._corpora.get(key.owner, {}).pop(key.name, None)
        self._changed(before)
        return before is not None

    def seen_by(self, tenant: str) -> list[tuple[CorpusKey, CorpusIndex]]:
        """The corpora that a tenant may see: its own, then everybody's, each in order of name."""
        return [
            (CorpusKey(owner, name), self._corpora[owner][name])
            for owner in (tenant, None)
            for name in sorted(self._corpora.get(owner, {}))
        ]

    def corpora(self, tenant: str, asked: tuple[str, ...]) -> Corpora:
        """The corpora that a session of this tenant drafts from: the named ones, or all that it may see.

        Raises NotFollowed for a name that the tenant does not see, whether or not another tenant has it.
        """
        selected = self._selected.get((tenant, asked))
        if selected is not None:
            return selected
        seen = self.seen_by(tenant)
        names = {key.name for key, _ in seen}
        if unknown := [name for name in asked if name not in names]:
            raise NotFollowed(f"tenant {tenant!r} has no corpus {unknown[0]!r} here")
        selected = Corpora([index for key, index in seen if not asked or key.name in asked])
        if len(self._selected) >= _CACHED_SELECTIONS:
            self._selected.clear()
        self._selected[tenant, asked] = selected
        return selected

    def close(self) -> None:
        """Unmaps every corpus."""
        for key, _ in list(self):
            self.remove(key)

    def _changed(self, gone: CorpusIndex | None) -> None:
        self._selected.clear()
        if gone is not None:
            gone.close()


def scope(tenant: str) -> str:
    """The name under which a tenant's texts are kept; never empty, even for the tenant without a name."""
    return f"tenant {tenant}"


def session_name(key: SessionKey) -> str:
    """A session's name in its tenant's past outputs."""
    return f"{key.session}#{key.choice}"
