"""The links of this worker to all sources outside, and the routing of each step's updates to these links."""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence

from verifier_service.engine.messages import Command, StepReport
from verifier_service.engine.stats import CountsByName
from verifier_service.remote_sources.link import SourceLink
from verifier_service.remote_sources.stream import LinkLimits
from verifier_service.remote_sources.subscription import Subscription

_IDLE_S = 60.0


class SourcePool:
    """One link per address: dialled when the first session names the address, closed when long unused."""

    def __init__(self, put: Callable[[Command], None], limits: LinkLimits) -> None:
        self.counts = CountsByName()
        """What the links dropped, by source name."""
        self._put = put
        self._limits = limits
        self._links: dict[str, SourceLink] = {}
        self._by_session: dict[int, dict[int, SourceLink]] = defaultdict(dict)
        """Link by source index, by session handle."""

    @property
    def attached(self) -> int:
        """How many links have their stream up; from any thread."""
        return sum(link.stream.attached for link in list(self._links.values()))

    def subscribe(self, address: str, subscription: Subscription, resting: bool = False) -> None:
        """Has the source at `address` draft for a session; once the source has rested, if it is `resting`."""
        link = self._links.get(address)
        if link is None:
            link = self._links[address] = SourceLink(address, self._put, self.counts, self._limits)
        by_index = self._by_session[subscription.view.handle]
        by_index.update(dict.fromkeys(subscription.source_indices, link))
        link.subscribe(subscription, resting)

    def weights_versions(self, handle: int) -> dict[int, int]:
        """Versions of the weights that a session's sources have learnt, by source index; 0 is left out."""
        by_index = self._by_session.get(handle, {})
        return {index: link.weights_version for index, link in by_index.items() if link.weights_version}

    def unsubscribe(self, handle: int, source_indices: Sequence[int]) -> None:
        """Ends a session's subscriptions to the sources of these indices."""
        by_index = self._by_session.get(handle, {})
        for link in {by_index.pop(index) for index in source_indices if index in by_index}:
            link.unsubscribe(handle)

    def end(self, handle: int) -> None:
        """Ends all subscriptions of a session that is no longer decoded here."""
        for link in set(self._by_session.pop(handle, {}).values()):
            link.unsubscribe(handle)

    def absorb(self, report: StepReport) -> None:
        """Sends the sources what a step committed, and mutes those that sent something malformed."""
        for link in self._links.values():
            link.least_survival = report.least_survival
        for strike in report.strikes:
            struck = self._by_session.get(strike.handle, {}).get(strike.source)
            if struck is not None:
                struck.strike(strike.handle, strike.why)
        for update in report.updates:
            by_index = self._by_session.get(update.handle, {})
            if update.parked is not None:
                self.end(update.handle)
            elif update.finish is None:
                awake = {link for index, link in by_index.items() if index not in update.resting}
                for link in set(by_index.values()):
                    link.progress(update, resting=link not in awake)

    def finish(self, report: StepReport) -> None:
        """Ends the subscriptions of the sessions that a step finished; sources that learn get what they lack.

        To be called after `absorb`, and once the readers of these sessions have been woken: to write and to
        read all tokens of a session takes about a millisecond, and a reader waits for the end.
        """
        for update in report.updates:
            if update.finish is not None:
                for link in set(self._by_session.pop(update.handle, {}).values()):
                    link.finish(update)

    async def close_idle(self) -> None:
        """Closes the links to which no session has subscribed for a minute."""
        now = time.monotonic()
        for address, link in list(self._links.items()):
            if link.idle_since is not None and now - link.idle_since > _IDLE_S:
                del self._links[address]
                await link.stream.close()

    async def close(self) -> None:
        """Closes every link."""
        links, self._links = list(self._links.values()), {}
        for link in links:
            await link.stream.close()
