"""All verifiers and remote sources of this orchestrator: who serves what, and where a session goes.

Joins the links (connections) with placement and fitness (decisions). Knows of requests only what placing them
needs.
"""

import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from orchestrator.fleet.compatibility import Described, Identity, Refusal, disagreeing, elected, unfitting
from orchestrator.fleet.peers import Links
from orchestrator.fleet.placement import (
    ChosenSource,
    Drafting,
    Worker,
    choose_sources,
    fitting_sources,
    inside,
    ranked,
    replaced,
    source_names,
)
from orchestrator.fleet.served_model import identity_of
from orchestrator.fleet.source_probe import SourceLink
from orchestrator.fleet.verifier_link import Patience, VerifierLink
from orchestrator.front.admission import Target
from orchestrator.front.speculation import Speculation
from outrider.runtime.resolving import resolve
from outrider.wire.channel import DEFAULT_MESSAGE_MB
from outrider.wire.status import peer_text
from outrider.wire.tls import Certificates
from outrider.wire.workers import WorkerEntry

log = logging.getLogger(__name__)


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
        certificates: Certificates | None = None,
    ) -> None:
        def verifier(address: str) -> VerifierLink:
            link = VerifierLink(
                address, patience=patience, max_message_mb=max_message_mb, certificates=certificates
            )
            link.has_peer = partial(self._has_peer, link)
            return link

        self._verifiers = Links(verifiers, verifier, every_s=resolve_s, resolve=resolve)
        source = partial(SourceLink, max_message_mb=max_message_mb, certificates=certificates)
        self._sources = Links(drafters, source, every_s=resolve_s, resolve=resolve)
        self.elsewhere: Mapping[str, int] = {}
        """Sessions by verifier that other orchestrators have there, as far as is known."""
        self.refused: Mapping[str, Refusal] = {}
        """By address, workers that are not used."""
        self._announced: dict[str, WorkerEntry] = {}
        self._elected: dict[str, Identity] = {}
        self._unusable: Mapping[str, Refusal] = {}
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

    async def registered(
        self, entries: Sequence[WorkerEntry], unusable: Mapping[str, Refusal] | None = None
    ) -> None:
        """These workers, and no others, have said that they are there, beside those that are given; of the
        unusable ones the address is all that matters."""
        self._unusable = unusable or {}
        self._announced = {entry.address: entry for entry in entries}
        await self._verifiers.register(it.address for it in entries if it.role == "verifier")
        await self._sources.register(it.address for it in entries if it.role != "verifier")
        self.judge()

    def alive(self, address: str) -> bool:
        """Whether somebody answers there."""
        link = self._links().get(address)
        return link is not None and link.reachable

    def draining(self, address: str) -> bool:
        """Whether the worker there has said that it is about to end."""
        link, entry = self.verifiers.get(address), self._entry(address)
        return (link is not None and link.draining) or (entry is not None and entry.draining)

    def is_registered(self, address: str) -> bool:
        """Whether it has said itself that it is there."""
        return self._entry(address) is not None

    def judge(self) -> None:
        """Finds out who is not used, and says why where that is new."""
        described = [
            Described(link.address, link.target.name, identity_of(link.target), link.reachable)
            for link in self._verifiers.staying
            if link.target is not None and link.refusal is None
        ]
        self._elected = elected(described, self._elected)
        refused = disagreeing(described, self._elected)
        if not self.unreached():  # else one may come whom a source fits
            digests = {
                address: link.said.tokenizer_digest for address, link in self.sources.items() if link.said
            }
            refused |= unfitting(digests, self._elected.values())
        links = self._links().items()
        refused |= {address: link.refusal for address, link in links if link.refusal is not None}
        refused |= self._unusable
        for address, refusal in refused.items():
            if self.refused.get(address) != refusal:
                fields = {"peer": address, "reason": refusal.kind, "why": peer_text(refusal.why)}
                log.warning("worker not used", extra={"fields": fields})
        self.refused = refused

    def targets(self) -> list[Target]:
        """What is served here, by verifiers that can be reached or were once."""
        self.judge()
        return [
            link.target
            for address, link in self.verifiers.items()
            if link.target is not None and address not in self.refused
        ]

    def served(self) -> list[Target]:
        """Of these, one of each name that a request can be opened for now."""
        found = {target.name: target for target in self.targets()}
        return [target for name, target in found.items() if self.verifiers_for(name)]

    def unreached(self) -> list[str]:
        """Verifiers that never said what they serve, and names that stand for none."""
        silent = [address for address, link in self.verifiers.items() if link.target is None]
        return silent + self._verifiers.unknown

    def verifiers_for(
        self,
        model: str,
        preferred: str = "",
        near: str = "",
        *,
        like: Target | None = None,
        numerics: str = "",
        limit: int = 0,
    ) -> list[VerifierLink]:
        """Where a session of this model can be opened, the best place first; see placement.ranked.

        Args:
            like: the very model that it has to be, whatever the name stands for by now.
            limit: ids that there has to be room for.
        """
        links = [it for it in self._verifiers.staying if self._serves(it, model, like, limit)]
        found = ranked([self._worker(link) for link in links], model, preferred, near, numerics)
        return [self.verifiers[worker.address] for worker in found]

    def source_names(self, target: Target) -> tuple[str, ...]:
        """Names of the sources that draft for it."""
        return source_names(inside(target.local_sources), self._fitting(target))

    def sources_for(self, target: Target, speculation: Speculation) -> tuple[ChosenSource, ...]:
        """The sources that a session is given. Raises InvalidRequest for a name that nobody has."""
        local = inside(target.local_sources, predicted=bool(speculation.prediction))
        chosen = choose_sources(local, self._fitting(target), speculation.sources, turn=next(self._turns))
        return chosen if speculation.enabled else ()

    def sources_instead(self, target: Target, chosen: tuple[ChosenSource, ...]) -> tuple[ChosenSource, ...]:
        """What a session should have in place of these sources; see placement.replaced."""
        return replaced(chosen, self._fitting(target), turn=next(self._turns))

    def count_sessions(self, sources: Sequence[ChosenSource], change: int) -> None:
        """So many sessions that use these sources began, or ended (below 0)."""
        for address in {source.address for source in sources if source.address}:
            # One that nobody knows any longer has nothing to be counted for.
            if (link := self.sources.get(address)) is not None:
                link.sessions += change

    def _entry(self, address: str) -> WorkerEntry | None:
        """What the worker announced; of a verifier that was given, nobody of another role says anything."""
        entry = self._announced.get(address)
        if entry is None or (entry.role == "verifier") != (address in self.verifiers):
            return None
        return entry

    def _links(self) -> dict[str, VerifierLink | SourceLink]:
        return {**self.verifiers, **self.sources}

    def _serves(self, link: VerifierLink, model: str, like: Target | None, limit: int = 0) -> bool:
        target = link.target
        if target is None or target.name != model or target.max_length < limit or link.refusal is not None:
            return False
        if like is None:
            return link.address not in self.refused
        return identity_of(target).agrees(identity_of(like))

    def _has_peer(self, link: VerifierLink) -> bool:
        """Whether another verifier could go on with this one's sessions."""
        target = link.target
        return target is not None and any(
            other is not link
            and other.reachable
            and not self.draining(other.address)
            and self._serves(other, target.name, target)
            for other in self._verifiers.staying
        )

    def _worker(self, link: VerifierLink) -> Worker:
        address, model = link.address, link.target.name if link.target is not None else ""
        entry = self._entry(address)
        told = 0 if entry is None else entry.state.sessions  # up to a second ago, of all orchestrators
        return Worker(
            address,
            model,
            max(told, link.sessions + self.elsewhere.get(address, 0)),
            link.reachable,
            link.capacity,
            link.step_s,
            self.draining(address),
            link.numerics,
        )

    def _fitting(self, target: Target) -> list[Drafting]:
        known = []
        for link in self._sources.staying:
            for drafting in link.drafting():
                if drafting.name in target.local_sources:
                    link.ignored(
                        Refusal(
                            "name",
                            f"it calls itself {drafting.name!r}, as does a source inside the verifier of "
                            f"{target.name!r}; give it another --name",
                        )
                    )
                else:
                    known.append(self._loaded(drafting))
        return fitting_sources(known, target.tokenizer_digest)

    def _loaded(self, drafting: Drafting) -> Drafting:
        """With what it announced itself."""
        if (entry := self._entry(drafting.address)) is None:
            return drafting
        return replace(
            drafting,
            sessions=max(drafting.sessions, entry.state.sessions),
            step_s=entry.state.step_s,
            draining=entry.draining,
        )
