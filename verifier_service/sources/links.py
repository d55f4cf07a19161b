"""All links of this worker: which session is followed by which, and what each has to be told after a step."""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence

from verifier_service.engine.messages import Batch, Offers
from verifier_service.engine.stats import CountsByName
from verifier_service.sources.following import Following, LinkLimits
from verifier_service.sources.link import SourceLink

_IDLE_S = 60.0


class Links:
    """One link per address, dialled when the first session names it, dropped when long unused."""

    def __init__(self, put: Callable[[Offers], None], limits: LinkLimits) -> None:
        self.counts = CountsByName()
        self._put = put
        self._limits = limits
        self._links: dict[str, SourceLink] = {}
        self._by_session: dict[int, dict[int, SourceLink]] = defaultdict(dict)

    @property
    def attached(self) -> int:
        """Links whose stream is up."""
        return sum(link.attached for link in list(self._links.values()))

    def follow(self, address: str, following: Following, resting: bool = False) -> None:
        """The source at `address` drafts for a session from now on, under all of its names there; one that
        rests hears of the session when it is to be told of a round."""
        link = self._links.get(address)
        if link is None:
            link = self._links[address] = SourceLink(address, self._put, self.counts, self._limits)
        self._by_session[following.mirror.handle].update(dict.fromkeys(following.credits, link))
        link.follow(following, resting)

    def unfollow(self, handle: int, credits: Sequence[int]) -> None:
        """A session listens to one of its sources, which has these credits there, no longer."""
        by_credit = self._by_session.get(handle, {})
        for link in {by_credit.pop(credit) for credit in credits if credit in by_credit}:
            link.end(handle)

    def end(self, handle: int) -> None:
        """A session is no longer decoded here."""
        for link in set(self._by_session.pop(handle, {}).values()):
            link.end(handle)

    def absorb(self, batch: Batch) -> None:
        """Tells the sources what a step did, and what steps take."""
        for known in self._links.values():
            known.least_survival = batch.least_survival
        for strike in batch.strikes:
            link = self._by_session.get(strike.handle, {}).get(strike.source)
            if link is not None:
                link.strike(strike.handle, strike.why)
        for update in batch.updates:
            by_credit = self._by_session.get(update.handle, {})
            if update.finish is not None:
                for link in set(self._by_session.pop(update.handle, {}).values()):
                    link.finish(update)
            elif update.parked is not None:
                self.end(update.handle)
            else:
                awake = {link for credit, link in by_credit.items() if credit not in update.resting}
                for link in set(by_credit.values()):
                    link.progress(update, tell=link in awake)

    async def drop_idle(self) -> None:
        """Closes links that have had nothing to follow for a minute."""
        now = time.monotonic()
        for address, link in list(self._links.items()):
            if link.idle_since is not None and now - link.idle_since > _IDLE_S:
                del self._links[address]
                await link.close()

    async def close(self) -> None:
        """Closes every link."""
        links, self._links = list(self._links.values()), {}
        for link in links:
            await link.close()
