"""All verifiers and remote sources of this orchestrator: who serves what, and where a session goes.

Joins the links (connections) with placement (decisions). Knows of requests only what placing them needs.
"""

import itertools
from collections.abc import Mapping, Sequence
from functools import partial

from orchestrator.discovery import Links, resolve
from orchestrator.drafters import SourceLink
from orchestrator.placement import (
    ChosenSource,
    Drafting,
    Worker,
    choose_sources,
    fitting_sources,
    inside,
    ranked,
    source_names,
)
from orchestrator.requests import Speculation, Target
from orchestrator.verifiers import Patience, VerifierLink
from outrider.wire.channel import DEFAULT_MESSAGE_MB


class Fleet:
    """The links, running. `stop` ends them."""

    def __init__(
        self,
        verifiers: Sequence[str],
        drafters: Sequence[str],
        patience: Patience,
        max_message_mb: int = DEFAULT_MESSAGE_MB,
        *,
        resolve_s: float = 5.0,
    ) -> None:
        def verifier(address: str) -> VerifierLink:
            link = VerifierLink(address, patience=patience, max_message_mb=max_message_mb)
            link.has_peer = partial(self._has_peer, link)
            return link

        self._verifiers = Links(verifiers, verifier, every_s=resolve_s, resolve=resolve)
        source = partial(SourceLink, max_message_mb=max_message_mb)
        self._sources = Links(drafters, source, every_s=resolve_s, resolve=resolve)
        self.elsewhere: Mapping[str, int] = {}
        """Sessions by verifier that other orchestrators have there, as far as is known."""
        self._turns = itertools.count()

    @property
    def verifiers(self) -> dict[str, VerifierLink]:
        """By address."""
        return self._verifiers.by_address

    @property
    def sources(self) -> dict[str, SourceLink]:
        """By address."""
        return self._sources.by_address

    def start(self) -> None:
        """Begin to dial everybody; returns at once."""
        self._verifiers.start()
        self._sources.start()

    async def stop(self) -> None:
        """End every link."""
        await self._verifiers.stop()
        await self._sources.stop()

    def _has_peer(self, link: VerifierLink) -> bool:
        """Whether another verifier could go on with this one's sessions."""
        name = link.target.name if link.target is not None else ""
        return any(other is not link for other in self.verifiers_for(name))

    def targets(self) -> list[Target]:
        """What is served here, by verifiers that can be reached or were once."""
        return [link.target for link in self.verifiers.values() if link.target is not None]

    def unreached(self) -> list[str]:
        """Verifiers that never said what they serve, and names that stand for none."""
        silent = [address for address, link in self.verifiers.items() if link.target is None]
        return silent + self._verifiers.unknown

    def verifiers_for(self, model: str, preferred: str = "", near: str = "") -> list[VerifierLink]:
        """Where a session of this model can be opened, the best place first; see placement.ranked."""
        workers = [
            Worker(
                link.address,
                link.target.name,
                link.sessions + self.elsewhere.get(link.address, 0),
                link.reachable,
            )
            for link in self._verifiers.staying
            if link.target is not None
        ]
        return [self.verifiers[worker.address] for worker in ranked(workers, model, preferred, near)]

    def source_names(self, target: Target) -> tuple[str, ...]:
        """Names of the sources that draft for it."""
        return source_names(inside(target.local_sources), self._fitting(target))

    def sources_for(self, target: Target, speculation: Speculation) -> tuple[ChosenSource, ...]:
        """The sources that a session is given. Raises InvalidRequest for a name that nobody has."""
        local = inside(target.local_sources, predicted=bool(speculation.prediction))
        chosen = choose_sources(local, self._fitting(target), speculation.sources, turn=next(self._turns))
        return chosen if speculation.enabled else ()

    def count_sessions(self, sources: Sequence[ChosenSource], change: int) -> None:
        """So many sessions that use these sources began, or ended (below 0)."""
        for address in {source.address for source in sources if source.address}:
            # One that nobody knows any longer has nothing to be counted for.
            if (link := self.sources.get(address)) is not None:
                link.sessions += change

    def _fitting(self, target: Target) -> list[Drafting]:
        known = []
        for link in self._sources.staying:
            for drafting in link.drafting():
                if drafting.name in target.local_sources:
                    link.ignored(
                        f"it calls itself {drafting.name!r}, as does a source inside the verifier of "
                        f"{target.name!r}; give it another --name"
                    )
                else:
                    known.append(drafting)
        return fitting_sources(known, target.tokenizer_digest)
