"""All verifiers and remote sources of this orchestrator: who serves which model, and where a session goes.

Joins the links (connections) with placement and compatibility (decisions). Knows of requests only what
placing them needs.
"""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from orchestrator.fleet.compatibility import (
    DescribedVerifier,
    Refusal,
    elect_identities,
    incompatible_sources,
    incompatible_verifiers,
)
from orchestrator.fleet.peers import PeerSet
from orchestrator.fleet.placement import (
    ChosenSource,
    SourceInfo,
    VerifierInfo,
    choose_sources,
    compatible_sources,
    rank_verifiers,
    replace_sources,
    source_names,
    usable_local_sources,
)
from orchestrator.fleet.source_probe import SourceProbe
from orchestrator.fleet.target_model import ModelIdentity, TargetModel
from orchestrator.fleet.verifier_link import Patience, VerifierLink
from outrider.runtime.resolving import resolve
from outrider.wire.channel import DEFAULT_MESSAGE_MB
from outrider.wire.names import EDGE
from outrider.wire.status import peer_text
from outrider.wire.tls import Certificates
from outrider.wire.workers import WorkerEntry

log = logging.getLogger(__name__)

MAX_FIRST_CALLS = 32
"""The most calls under way to registered workers that have never answered."""


class Fleet:
    """Verifiers and sources by address; `start` dials them, `stop` hangs up."""

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
        given, first_calls = {*verifiers, *drafters}, asyncio.Semaphore(MAX_FIRST_CALLS)

        def verifier(address: str) -> VerifierLink:
            link = VerifierLink(
                address,
                patience=patience,
                max_message_mb=max_message_mb,
                certificates=certificates,
                first_calls=None if address in given else first_calls,
            )
            link.has_peer = partial(self._has_peer, link)
            return link

        def source(address: str) -> SourceProbe:
            return SourceProbe(
                address,
                max_message_mb=max_message_mb,
                certificates=certificates,
                first_calls=None if address in given else first_calls,
            )

        self._verifiers = PeerSet(verifiers, verifier, every_s=resolve_s, resolve=resolve)
        self._sources = PeerSet(drafters, source, every_s=resolve_s, resolve=resolve)
        self.elsewhere: Mapping[str, int] = {}
        """Sessions that other orchestrators have at each verifier, by its address, as far as they report."""
        self.refused: Mapping[str, Refusal] = {}
        """Workers that are not used, by address."""
        self._announced: dict[str, WorkerEntry] = {}
        self._elected: dict[str, ModelIdentity] = {}
        self._unusable: Mapping[str, Refusal] = {}
        self._turns = itertools.count()

    @property
    def verifiers(self) -> dict[str, VerifierLink]:
        """Links to all verifiers, by address."""
        return self._verifiers.by_address

    @property
    def sources(self) -> dict[str, SourceProbe]:
        """Probes of all remote sources, by address."""
        return self._sources.by_address

    def start(self) -> None:
        """Begin to dial all peers; returns at once."""
        self._verifiers.start()
        self._sources.start()

    async def wait_for_verifiers(self, within_s: float) -> None:
        """Wait until each verifier that the settings name was reached, or a first attempt has failed.

        Args:
            within_s: the longest wait.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._verifiers.resolved.wait()
                for link in [*self.verifiers.values()]:
                    await link.first_attempt_done.wait()

    async def stop(self) -> None:
        """Close the links to all workers."""
        await self._verifiers.stop()
        await self._sources.stop()

    async def registered(
        self, entries: Sequence[WorkerEntry], unusable: Mapping[str, Refusal] | None = None
    ) -> None:
        """Use the workers that have registered, and no others, beside those that the settings name.

        Args:
            entries: the registered workers.
            unusable: reasons not to use registered workers, by address.
        """
        self._unusable = unusable or {}
        self._announced = {entry.address: entry for entry in entries}
        await self._verifiers.register(it.address for it in entries if it.role == "verifier")
        await self._sources.register(it.address for it in entries if it.role != "verifier")
        self.judge()

    def alive(self, address: str) -> bool:
        """Whether a worker answers at this address."""
        link = self._links().get(address)
        return link is not None and link.reachable

    def draining(self, address: str) -> bool:
        """Whether the worker at this address says that it is about to end."""
        link, entry = self.verifiers.get(address), self._entry(address)
        return (link is not None and link.draining) or (entry is not None and entry.draining)

    def is_registered(self, address: str) -> bool:
        """Whether the worker at this address has registered."""
        return self._entry(address) is not None

    def judge(self) -> None:
        """Decide which workers are not used, and log the reasons that are new."""
        described = [
            DescribedVerifier(link.address, link.target.name, link.target.identity, link.reachable)
            for link in self._verifiers.staying
            if link.target is not None and link.refusal is None
        ]
        self._elected = elect_identities(described, self._elected)
        refused = incompatible_verifiers(described, self._elected)
        if not self.unreached():  # else a verifier may yet come whose tokenizer a source has
            digests = {
                address: probe.described.tokenizer_digest
                for address, probe in self.sources.items()
                if probe.described
            }
            refused |= incompatible_sources(digests, self._elected.values())
        links = self._links().items()
        refused |= {address: link.refusal for address, link in links if link.refusal is not None}
        refused |= self._unusable
        for address, refusal in refused.items():
            if self.refused.get(address) != refusal:
                fields = {"peer": address, "reason": refusal.kind, "why": peer_text(refusal.why)}
                log.warning("worker not used", extra={"fields": fields})
        self.refused = refused

    def targets(self) -> list[TargetModel]:
        """The models of all verifiers that are used and can be reached, or could be once."""
        self.judge()
        return [
            link.target
            for address, link in self.verifiers.items()
            if link.target is not None and address not in self.refused
        ]

    def served(self) -> list[TargetModel]:
        """The models that a request can be opened for now, one of each name."""
        found = {target.name: target for target in self.targets()}
        return [target for name, target in found.items() if self.verifiers_for(name)]

    def unreached(self) -> list[str]:
        """Addresses of verifiers that never described themselves, and names that resolve to no address."""
        silent = [address for address, link in self.verifiers.items() if link.target is None]
        return silent + self._verifiers.unknown

    def verifiers_for(
        self,
        model: str,
        preferred: str = "",
        near: str = "",
        *,
        like: TargetModel | None = None,
        numerics: str = "",
        limit: int = 0,
    ) -> list[VerifierLink]:
        """The verifiers that can open a session of this model now, the best place first; see rank_verifiers.

        Args:
            like: the model that the session needs, whatever model the name stands for by now.
            limit: the most tokens of the session, which the verifier's context has to hold.
        """
        links = [it for it in self._verifiers.staying if self._serves(it, model, like, limit)]
        found = rank_verifiers([self._info(link) for link in links], model, preferred, near, numerics)
        return [self.verifiers[info.address] for info in found]

    def open_verifiers(self, model: str) -> int:
        """How many verifiers can open a session of this model now."""
        links = (link for link in self._verifiers.staying if self._serves(link, model, None))
        return sum(link.reachable and not self.draining(link.address) for link in links)

    def most_sessions(self, model: str) -> int:
        """How many sessions all verifiers of this model can have open together."""
        return sum(link.capacity for link in self._verifiers.staying if self._serves(link, model, None))

    def most_choices(self, model: str) -> int:
        """How many choices a request to this model can have: one verifier decodes all of them."""
        links = (link for link in self._verifiers.staying if self._serves(link, model, None))
        return max((link.capacity for link in links), default=0)

    def source_names(self, target: TargetModel) -> tuple[str, ...]:
        """Names of the sources that draft for this model and for any tenant."""
        return source_names(usable_local_sources(target.local_sources), self._remote_sources(target, ""))

    def sources_for(
        self, target: TargetModel, wanted: Sequence[str], *, tenant: str, given: Collection[str] = ()
    ) -> tuple[ChosenSource, ...]:
        """The sources of a new session; see choose_sources. Raises InvalidRequest for an unknown name.

        Args:
            tenant: the session's tenant; sources of other tenants are left out.
            wanted: the names that the request asks for; empty: all names.
            given: names of the sources that have a part of the request to draft from.
        """
        local = usable_local_sources(target.local_sources, given)
        remote = self._remote_sources(target, tenant)
        idle = set(target.local_sources).difference(local)
        return choose_sources(local, remote, wanted, turn=next(self._turns), idle=idle)

    def sources_instead(
        self,
        target: TargetModel,
        chosen: tuple[ChosenSource, ...],
        *,
        tenant: str,
        staying: Collection[str] = (),
    ) -> tuple[ChosenSource, ...]:
        """Sources that a session should have now: those chosen, with each lost or lagging one replaced.

        The rule is `replace_sources`, which explains `staying`.
        """
        remote = self._remote_sources(target, tenant)
        return replace_sources(chosen, remote, turn=next(self._turns), staying=staying)

    def count_sessions(self, sources: Sequence[ChosenSource], change: int) -> None:
        """Add `change` to the sessions of each of these sources."""
        for address in {source.address for source in sources if source.address}:
            if (probe := self.sources.get(address)) is not None:  # None: the source has left the fleet
                probe.sessions += change

    def drafted(self, target: TargetModel, sources: Iterable[ChosenSource]) -> None:
        """Remember that this model has accepted tokens of these sources."""
        for source in sources:
            if (probe := self.sources.get(source.address)) is not None:
                probe.drafted_for.add(target.name)

    def _entry(self, address: str) -> WorkerEntry | None:
        """The worker's own announcement.

        A worker of another role cannot speak for a verifier that the settings name.
        """
        entry = self._announced.get(address)
        if entry is None or (entry.role == "verifier") != (address in self.verifiers):
            return None
        return entry

    def _links(self) -> dict[str, VerifierLink | SourceProbe]:
        return {**self.verifiers, **self.sources}

    def _serves(self, link: VerifierLink, model: str, like: TargetModel | None, limit: int = 0) -> bool:
        target = link.target
        if target is None or target.name != model or target.max_length < limit or link.refusal is not None:
            return False
        if like is None:
            return link.address not in self.refused
        return target.identity.agrees(like.identity)

    def _has_peer(self, link: VerifierLink) -> bool:
        """Whether another verifier could take this verifier's sessions."""
        target = link.target
        return target is not None and any(
            other is not link
            and other.reachable
            and not self.draining(other.address)
            and self._serves(other, target.name, target)
            for other in self._verifiers.staying
        )

    def _info(self, link: VerifierLink) -> VerifierInfo:
        address, model = link.address, link.target.name if link.target is not None else ""
        entry = self._entry(address)
        announced = 0 if entry is None else entry.state.sessions  # up to a second old, of all orchestrators
        return VerifierInfo(
            address,
            model,
            max(announced, link.sessions + self.elsewhere.get(address, 0)),
            link.reachable,
            link.capacity,
            link.step_s,
            self.draining(address),
            link.numerics,
        )

    def _remote_sources(self, target: TargetModel, tenant: str) -> list[SourceInfo]:
        """The remote sources that can follow this model for a tenant; empty: those that follow any tenant.

        Refuses those that have a local source's name.
        """
        known = []
        for probe in self._sources.staying:
            for source in probe.infos():
                if source.name == EDGE:
                    probe.refuse(Refusal("name", f"it calls itself {EDGE!r}, as clients' devices are called"))
                elif source.name in target.local_sources:
                    probe.refuse(
                        Refusal(
                            "name",
                            f"it calls itself {source.name!r}, as does a source inside the verifier of "
                            f"{target.name!r}; give it another --name",
                        )
                    )
                else:
                    source = replace(source, proven=target.name in probe.drafted_for)
                    known.append(self._with_announced_load(source))
        return compatible_sources(known, target.tokenizer_digest, tenant)

    def _with_announced_load(self, source: SourceInfo) -> SourceInfo:
        if (entry := self._entry(source.address)) is None:
            return source
        return replace(
            source,
            sessions=max(source.sessions, entry.state.sessions),
            step_s=entry.state.step_s,
            draining=entry.draining,
        )
