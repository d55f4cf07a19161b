"""All verifiers and remote sources of this orchestrator: who serves what, and where a session goes.

Joins the links (connections) with placement (decisions). Knows of requests only what placing them needs.
"""

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from functools import partial

from orchestrator.drafters import SourceLink
from orchestrator.placement import (
    ChosenSource,
    Drafting,
    Worker,
    choose_sources,
    fitting_sources,
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
    ) -> None:
        self.verifiers = {
            address: VerifierLink(address, patience=patience, max_message_mb=max_message_mb)
            for address in dict.fromkeys(verifiers)
        }
        for link in self.verifiers.values():
            link.has_peer = partial(self._has_peer, link)
        self.sources = {
            address: SourceLink(address, max_message_mb=max_message_mb) for address in dict.fromkeys(drafters)
        }
        self.elsewhere: Mapping[str, int] = {}
        """Sessions by verifier that other orchestrators have there, as far as is known."""
        self._turns = itertools.count()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to dial everybody; returns at once."""
        runs = [link.run() for link in self.verifiers.values()]
        runs += [link.run() for link in self.sources.values()]
        self._tasks = [asyncio.create_task(run) for run in runs]

    async def stop(self) -> None:
        """End every link."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _has_peer(self, link: VerifierLink) -> bool:
        """Whether another verifier could go on with this one's sessions."""
        name = link.target.name if link.target is not None else ""
        return any(other is not link for other in self.verifiers_for(name))

    def targets(self) -> list[Target]:
        """What is served here, by verifiers that can be reached or were once."""
        return [link.target for link in self.verifiers.values() if link.target is not None]

    def unreached(self) -> list[str]:
        """Verifiers that never said what they serve."""
        return [address for address, link in self.verifiers.items() if link.target is None]

    def verifiers_for(self, model: str, preferred: str = "", near: str = "") -> list[VerifierLink]:
        """Where a session of this model can be opened, the best place first; see placement.ranked."""
        workers = [
            Worker(
                link.address,
                link.target.name,
                link.sessions + self.elsewhere.get(link.address, 0),
                link.reachable,
            )
            for link in self.verifiers.values()
            if link.target is not None
        ]
        return [self.verifiers[worker.address] for worker in ranked(workers, model, preferred, near)]

    def source_names(self, target: Target) -> tuple[str, ...]:
        """Names of the sources that draft for it."""
        return source_names(target.local_sources, self._fitting(target))

    def sources_for(self, target: Target, speculation: Speculation) -> tuple[ChosenSource, ...]:
        """The sources that a session is given. Raises InvalidRequest for a name that nobody has."""
        chosen = choose_sources(
            target.local_sources, self._fitting(target), speculation.sources, turn=next(self._turns)
        )
        return chosen if speculation.enabled else ()

    def count_sessions(self, sources: Sequence[ChosenSource], change: int) -> None:
        """So many sessions that use these sources began, or ended (below 0)."""
        for source in sources:
            if source.address:
                self.sources[source.address].sessions += change

    def _fitting(self, target: Target) -> list[Drafting]:
        known = []
        for link in self.sources.values():
            drafting = link.drafting()
            if drafting is None:
                continue
            if drafting.name in target.local_sources:
                link.ignored(
                    f"it calls itself {drafting.name!r}, as does a source inside the verifier of "
                    f"{target.name!r}; give it another --name"
                )
                continue
            known.append(drafting)
        return fitting_sources(known, target.tokenizer_digest)
