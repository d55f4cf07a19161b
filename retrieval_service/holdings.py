"""What drafts come from: corpora by owner and name, past outputs, references; what a session may see of it.

Nobody sees what another tenant owns. Changed and read by the engine's thread alone; each memory may be
written to from elsewhere.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from outrider.source.events import NotFollowed
from outrider.wire.codec import SessionKey
from retrieval_service.corpus.index import Corpora, CorpusIndex
from retrieval_service.memories import Memory
from speculative.errors import InvalidRequest

CORPUS, PAST, DENSE = NAMES = ("corpus", "past", "dense")
"""Under which a session listens to this service; usage and metrics name them apart."""
_DRAWN_KEPT = 1024


class PastMemory(Protocol):
    """Past outputs of all tenants, by `scope`, as this service uses them; see `retrieval_service.past`."""

    def extend(self, tenant: str, session: str, ids: Sequence[int]) -> bool:
        """These ids were generated next; whether they are kept."""

    def finish(self, tenant: str, session: str) -> None:
        """The session is over, or goes on elsewhere."""

    def memory(self, tenant: str) -> Memory:
        """What this tenant's sessions draw on."""

    def stats(self) -> "PastStats":
        """What is held."""


class PastStats(Protocol):
    """The part of it that is shown."""

    @property
    def tokens(self) -> int:
        """Ids of all tenants."""


class ReferenceMemory(Protocol):
    """References of all sessions, as this service uses them; see `retrieval_service.dense`."""

    def follow(self, session: Hashable, tenant: str, ids: Sequence[int]) -> Memory:
        """A session begins."""

    def progress(self, session: Hashable, ids: Sequence[int]) -> None:
        """All of its ids now."""

    def end(self, session: Hashable) -> None:
        """It is over."""

    @property
    def count(self) -> int:
        """Documents of all tenants."""


@dataclass(frozen=True, slots=True)
class CorpusKey:
    """Whose a corpus is, and what it is called there."""

    owner: str | None
    """The tenant; None: everybody's."""
    name: str

    def __str__(self) -> str:
        return f"{self.name!r} of {'everybody' if self.owner is None else f'tenant {self.owner!r}'}"


class Holdings:
    """Everything that this service remembers."""

    def __init__(self, past: PastMemory | None = None, references: ReferenceMemory | None = None) -> None:
        self.past = past
        self.references = references
        self._corpora: dict[str | None, dict[str, CorpusIndex]] = {}
        self._drawn: dict[tuple[str, tuple[str, ...]], Corpora] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Under which there may be drafts."""
        return (CORPUS, *[PAST] * (self.past is not None), *[DENSE] * (self.references is not None))

    def __iter__(self) -> Iterator[tuple[CorpusKey, CorpusIndex]]:
        for owner, corpora in list(self._corpora.items()):
            for name, index in list(corpora.items()):
                yield CorpusKey(owner, name), index

    def add(self, key: CorpusKey, index: CorpusIndex) -> None:
        """Drafts come from this corpus too, in place of the one of that name.

        Raises InvalidRequest where it is somebody else's than the key says.
        """
        if index.header.tenant != key.owner:
            raise InvalidRequest(f"corpus {key}: its files belong to {index.header.tenant or 'everybody'}")
        before = self._corpora.setdefault(key.owner, {}).get(key.name)
        self._corpora[key.owner][key.name] = index
        self._changed(before)

    def remove(self, key: CorpusKey) -> bool:
        """Drafts come from this corpus no longer; whether there was one."""
        before = self._corpora.get(key.owner, {}).pop(key.name, None)
        self._changed(before)
        return before is not None

    def seen_by(self, tenant: str) -> list[tuple[CorpusKey, CorpusIndex]]:
        """The tenant's own corpora, then everybody's, each by name."""
        return [
            (CorpusKey(owner, name), self._corpora[owner][name])
            for owner in (tenant, None)
            for name in sorted(self._corpora.get(owner, {}))
        ]

    def corpora(self, tenant: str, asked: tuple[str, ...]) -> Corpora:
        """Those that a session of this tenant draws on: the named ones, or all that it may see.

        Raises NotFollowed for a name that it does not see; whether somebody else has one is not told.
        """
        drawn = self._drawn.get((tenant, asked))
        if drawn is not None:
            return drawn
        seen = self.seen_by(tenant)
        names = {key.name for key, _ in seen}
        if unknown := [name for name in asked if name not in names]:
            raise NotFollowed(f"tenant {tenant!r} has no corpus {unknown[0]!r} here")
        drawn = Corpora([index for key, index in seen if not asked or key.name in asked])
        if len(self._drawn) >= _DRAWN_KEPT:
            self._drawn.clear()
        self._drawn[tenant, asked] = drawn
        return drawn

    def close(self) -> None:
        """Lets every corpus go."""
        for key, _ in list(self):
            self.remove(key)

    def _changed(self, gone: CorpusIndex | None) -> None:
        self._drawn.clear()
        if gone is not None:
            gone.close()


def scope(tenant: str) -> str:
    """What a tenant is called in the memories: never empty, unlike the name of the tenant that has none."""
    return f"tenant {tenant}"


def name_of(key: SessionKey) -> str:
    """A session's name in its tenant's past outputs."""
    return f"{key.session}#{key.choice}"
