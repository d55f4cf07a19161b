"""The sources that draft for one session: which of them count, how fast and how good they are.

Knows the session's drafts and rounds, but neither its model nor how drafts arrive. The session's own
proposers are timed here; other times come as arguments.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from outrider.wire.names import LOOKUP_BELOW
from speculative.calibration import SessionCalibrator
from speculative.draft import Draft
from speculative.draft_nodes import Leaf
from speculative.draft_pool import DraftPool
from speculative.grammar import Matcher
from speculative.marginal import DraftedPlace, Order, SourceGain, credited
from speculative.policies.local import LocalDrafts
from verifier_service.engine.source_policy import DraftWaits, Reputations, SourceLatency
from verifier_service.observe.round_log import Rest, SourceState
from verifier_service.proposers import LEAF_PROPOSERS, PROPOSERS, ProposerInit
from verifier_service.proposers.own_text.active import ActiveProposer, SessionProposers
from verifier_service.proposers.own_text.lookup import LeafDrafts
from verifier_service.remote_sources.source_presence import SourcePresence
from verifier_service.remote_sources.sources_at_address import SourcesAtAddress
from verifier_service.sessions.request import SessionRequest, SourceSet

_WEIGHT = 0.1
"""Weight of one round in the running mean of a session's tokens per round."""
_LAST: Order = (3, 0, 0)
_BELOW: Order = (4, 0, 0)


class RoundScore(NamedTuple):
    """What a session's sources had drafted when a round began."""

    places: Sequence[DraftedPlace]
    """The committed positions for which something was drafted, from the first on."""
    admitted: Mapping[tuple[int, ...], int]
    """Number of admitted nodes by their source indices, which are in the order of their offers."""
    node_cost: float = 0.0
    """Cost of an admitted node's row, in tokens."""
    pass_ms: float = 0.0
    """Milliseconds that the forward took; 0: that was not measured."""


class Standing(NamedTuple):
    """How those of a session's sources that may rest stood behind a round."""

    states: tuple[SourceState, ...]
    resting: frozenset[int]
    """Remote sources that are not sent the round, by source index."""


_Remote = list[tuple[Rest, float | None]]
"""Why the sources at each address are not sent the round, and what they cost."""


class SessionSources:
    """One session's sources, by source index from 1.

    Args:
        request: the session's request.
        reputations: what other sessions taught about the sources.
        grammar: matcher of the session's text, which stands after its ids; None: any text.
    """

    def __init__(
        self, request: SessionRequest, reputations: Reputations, grammar: Matcher | None = None
    ) -> None:
        self.latencies: dict[int, SourceLatency] = {}
        """Latency of each remote source in use, by source index."""
        self.batched: dict[str, int] = {}
        """Source index of each batched proposer in use, by name."""
        self.calibrator = SessionCalibrator()
        """Calibrates what each source says of its drafts."""
        self.held_back = 0
        """Number of drafts of the last `proposals` that were not offered."""
        self.may_rest = True
        """Whether sources of the session's own text rest where they gain too little."""
        self.waits = DraftWaits()
        """How long rounds wait for the drafts of sources that asked for waiting."""
        self._request = request
        self._params = request.params
        self._policy = request.policy
        self._local: dict[int, LocalDrafts] = {}
        """What cuts the drafts of each source inside this worker, by source index; none without a policy."""
        self._published_ms = 0.0
        self._round_ms = 0.0
        """Milliseconds between the last two rounds that were published."""
        self._reputations = reputations
        self._proposer_init = ProposerInit(
            request.prompt_length, request.prediction, request.references, grammar
        )
        self._proposers = SessionProposers(self._proposer_init)
        self._below: LeafDrafts | None = None
        """Drafts below the leaves of other sources' drafts; None: the session does not name the source."""
        self._own_text: frozenset[int] = frozenset()
        """Source indices of the lookups in the session's own text."""
        self._active: frozenset[int] = frozenset()
        self._muted: set[int] = set()
        self._addresses: list[SourcesAtAddress] = []
        """Remote sources in use, by address."""
        self._at: dict[int, SourcesAtAddress] = {}
        """The same by source index."""
        self._stood: tuple[tuple[list[SourceState], _Remote], Standing] | None = None
        """How the sources stood when they were last asked; None: they have changed since."""
        self._gains: dict[int, SourceGain] = {}
        """What each source gained in this session and others, by source index."""
        self._tokens = 1.0
        """Running mean of the tokens per round."""
        self._heard: set[int] = set()
        """Sources whose drafts came since the last round, by source index."""
        self._tops: dict[int, int] = {}
        """How many of the target's likeliest ids a source wants, by source index."""

    def use(self, sources: SourceSet) -> None:
        """Changes the sources; a source that drafted before goes on where it was."""
        reputations = [self._reputations.of(name, self._params) for name in sources.names]
        self.calibrator.use([reputation.calibration for reputation in reputations])
        self._gains = {index: reputation.gain for index, reputation in enumerate(reputations, start=1)}
        self._active = sources.proposers | sources.remote
        self.waits.keep_only(self._active)
        inside = {sources.names[index - 1]: index for index in sources.proposers}
        self.batched = {
            name: index for name, index in inside.items() if name not in {*PROPOSERS, *LEAF_PROPOSERS}
        }
        self._use_below(inside)
        self._proposers.use(inside, reputations)
        self._local = {
            source_index: cuts
            for source_index in sorted(sources.proposers)
            if (cuts := self._local.get(source_index) or self._cuts(sources.names[source_index - 1]))
        }
        listening = sources.remote - self._muted
        self.latencies = {
            source_index: self.latencies.get(source_index) or SourceLatency() for source_index in listening
        }
        self._addresses = self._grouped(sources, listening)
        self._at = {index: address for address in self._addresses for index in address.indices}
        self._stood = None

    @property
    def resting(self) -> frozenset[int]:
        """Remote sources, by source index, that are not sent the last round."""
        return frozenset(
            [
                source_index
                for address in self._addresses
                if address.throttle.resting or self._pauses(address)
                for source_index in address.indices
            ]
        )

    def standing(self, sessions: int) -> Standing:
        """How sources that may rest stand, in steps of `sessions` sessions; one object until that changes."""
        inside = self._proposers.states
        if self._below is not None:
            inside.append(self._below.state)
        remote = [
            (address.rest(paused=self._pauses(address)), address.slowdown(sessions))
            for address in self._addresses
        ]
        if self._stood is None or (inside, remote) != self._stood[0]:
            self._stood = (inside, remote), _standing(inside, self._addresses, remote)
        return self._stood[1]

    @property
    def may_be_awaited(self) -> bool:
        """Whether a remote source has drafted lately, so that a step might wait for its next draft."""
        return any([not latency.silent for latency in self.latencies.values()])

    @property
    def uses(self) -> list[tuple[SourcePresence, bool]]:
        """Addresses that the session does not leave alone itself, and whether each is sent the last round."""
        return [
            (address.presence, not self._pauses(address))
            for address in self._addresses
            if address.presence is not None and not address.throttle.resting
        ]

    def listens_to(self, source_index: int) -> bool:
        """Whether the session uses this source's drafts."""
        return source_index in self._active and source_index not in self._muted

    def mute(self, source_index: int) -> None:
        """Ignores this source from now on."""
        self._muted.add(source_index)
        self._stood = None
        self.latencies.pop(source_index, None)
        self.waits.ask(source_index, 0)
        if (address := self._at.pop(source_index, None)) is not None:
            address.indices.discard(source_index)
            if not address.indices:
                self._addresses.remove(address)

    def want_tops(self, source_index: int, tops: int) -> None:
        """Collects `tops` of the target's likeliest ids of each row for a source that drafts."""
        self._tops[source_index] = tops

    @property
    def tops(self) -> int:
        """Number of the target's likeliest ids that some source wants now; 0: none asks, or all rest."""
        if not any(self._tops.values()):
            return 0
        resting = self.resting
        wanted = [
            tops
            for source_index, tops in self._tops.items()
            if source_index not in resting and self.listens_to(source_index)
        ]
        return max(wanted, default=0)

    @property
    def may_propose(self) -> bool:
        """Whether a source of the session's own text does not rest."""
        return any([not active.is_resting for active in self._proposers])

    def proposals(
        self, ids: Sequence[int], end: int, node_limit: int, least: float = 0.0
    ) -> Iterator[tuple[int, Draft]]:
        """Gives proposers the first `end` of the session's ids; yields drafts, each with its source index.

        Proposers draft only where `end` is the number of all ids. Most drafts whose first nodes are accepted
        less often than `least`, as calibrated, are held back: to merge and rank a draft takes longer than to
        find that no step will admit its nodes.
        """
        self.held_back = 0
        for active in self._proposers:
            if active.is_resting:
                continue
            began = time.perf_counter()
            if (kept := self._draft(active, ids, end, node_limit, least)) is not None:
                yield active.source_index, kept  # the caller merges the draft before it asks for the next
            active.took(1000 * (time.perf_counter() - began), offers=kept is not None)

    def _draft(
        self, active: ActiveProposer, ids: Sequence[int], end: int, node_limit: int, least: float
    ) -> Draft | None:
        """What a proposer offers, with the arguments of `proposals`; None: nothing."""
        if (found := active.propose(ids, end, node_limit)) is None:
            return None
        if (kept := self.cut(active.source_index, found)) is None:
            return None
        if active.holds_back(kept, self.calibrator.worth, least):
            self.held_back += 1
            return None
        return kept

    def proposals_below(
        self, ids: Sequence[int], pool: DraftPool, node_limit: int
    ) -> Iterator[tuple[int, Leaf, Draft]]:
        """Yields drafts below the likeliest drafted leaves, each with its source index and its leaf."""
        if self._below is None or not pool.drafted:
            return
        for leaf, found in self._below.propose(ids, pool, self._own_text, node_limit):
            if (kept := self.cut(self._below.source_index, found)) is not None:
                yield self._below.source_index, leaf, kept

    def cut(self, source_index: int, draft: Draft) -> Draft | None:
        """What the session's policy leaves of a draft made inside this worker; None: nothing."""
        cuts = self._local.get(source_index)
        return draft if cuts is None else cuts.cut(draft)

    def heard(self, source_index: int) -> None:
        """Notes that a draft of this source has come."""
        self._heard.add(source_index)

    def share(self, source_index: int) -> float:
        """Part of the source's right tokens that no better source had drafted, 0 to 1."""
        return self._gains[source_index].share

    def committed(
        self,
        tokens: Sequence[int],
        token_sources: bytes,
        scored: RoundScore,
        *,
        spared: bool,
        batch: int,
        step: int,
    ) -> dict[int, int]:
        """Notes a committed round; returns the accepted tokens that count for each source alone, by index.

        Args:
            tokens: the committed tokens.
            token_sources: source index of each committed token, 0 for the target itself.
            scored: what the sources had drafted, admitted or not.
            spared: whether sources had drafted, and the step admitted none of their nodes.
            batch: sessions in the step.
            step: the step's number; 0: each call is a step of its own.
        """
        for cuts in self._local.values():
            cuts.committed(tokens, self._round_ms)
        heard = self._heard
        if self.waits.wanted:
            self.waits.committed(token_sources, heard)
        own = self._credit(scored, token_sources)
        self._tokens += _WEIGHT * (len(token_sources) - self._tokens)
        row = scored.node_cost / self._tokens
        for address in self._addresses:
            if address.throttle.resting and not own and heard.isdisjoint(address.indices):
                # There is nothing to weigh, and the sources of many sessions rest in most rounds.
                address.throttle.rested(batch, step)
            else:
                self._weigh(address, own, row, spared, batch, step, scored.pass_ms)
        if (below := self._below) is not None:
            gain = self._gains[below.source_index]
            # Such a token only lengthens a round whose drafts were right so far: it saves a part of a round.
            saved = own.get(below.source_index, 0) * gain.net(row) / self._tokens
            below.committed(saved, spared=spared, batch=batch, step=step, right=gain.often_right)
        if self.may_rest:
            self._proposers.committed(
                own, self._gains, row, spared=spared, batch=batch, step=step, pass_ms=scored.pass_ms
            )
        heard.clear()
        return own

    def _weigh(
        self,
        address: SourcesAtAddress,
        own: Mapping[int, int],
        row: float,
        spared: bool,
        batch: int,
        step: int,
        pass_ms: float,
    ) -> None:
        """Notes what the sources at an address saved in a round; `row` is the cost of a row, in rounds."""
        # Without a token that only this source had, the target's own token ends the round in its place,
        # and one more round makes up for the rest. Such a token saves a round, however long rounds are.
        counted = address.indices & own.keys()
        saved = sum([own[index] * self._gains[index].net(row) for index in counted])
        drafted = not self._heard.isdisjoint(address.indices)
        if drafted and address.presence is not None:
            address.presence.saved(saved)
        address.throttle.committed(
            saved,
            drafted,
            spared,
            batch,
            step,
            price=address.price(batch),
            right=any([self._gains[index].often_right for index in address.indices]),
            pass_ms=pass_ms,
        )

    def _use_below(self, inside: dict[str, int]) -> None:
        """Sets what drafts below leaves, given the sources in use inside this worker."""
        self._own_text = frozenset([index for name, index in inside.items() if name == "lookup"])
        source_index = inside.get(LOOKUP_BELOW)
        if source_index is None:
            self._below = None
        elif self._below is None:
            self._below = LeafDrafts(source_index, self._proposer_init, self._request, self._reputations)

    def _grouped(self, sources: SourceSet, listening: frozenset[int]) -> list[SourcesAtAddress]:
        """The sources by address; an address that the session used before goes on where it was."""
        known = {frozenset(address.names): address for address in self._addresses}
        found = []
        for group in dict.fromkeys([sources.at_one_address(index) for index in sorted(listening)]):
            names = tuple([sources.names[index - 1] for index in sorted(group)])
            address = known.get(frozenset(names))
            if address is None:
                address = SourcesAtAddress(names, self._reputations.of_address(names, self._params))
            address.indices = set(group & listening)
            found.append(address)
        return found

    def _pauses(self, address: SourcesAtAddress) -> bool:
        """Whether a trial leaves the address alone; rounds that wait for its drafts would wait in vain."""
        return address.is_paused and not any([self.waits.asks(index) for index in address.indices])

    def _credit(self, scored: RoundScore, token_sources: bytes) -> dict[int, int]:
        """The accepted tokens that count for each source.

        Notes what each source gained, admitted or not: the next step may admit what this one did not.
        """
        if not scored.places:
            return {}
        # Who comes first is asked only where several sources have drafted one node.
        shared = [*scored.admitted, *[place.right for place in scored.places]]
        order = self._order() if max(map(len, shared)) > 1 else {}
        # Plain dictionaries: a Counter takes several times as long, and every session of a step comes here.
        accepted: dict[int, int] = {}
        gained = {source_index: [0, 0, 0] for place in scored.places for source_index in place.drafted}
        for place, token_source in zip(scored.places, token_sources, strict=False):
            winner = credited(place.right, order, _LAST) if place.right else 0
            for source_index in place.right:
                gained[source_index][0] += 1
            if winner:
                gained[winner][1] += 1
                if token_source:
                    accepted[winner] = accepted.get(winner, 0) + 1
            for source_index in place.drafted:
                if (latency := self.latencies.get(source_index)) is not None:
                    latency.verified(source_index == winner)
        for sources, count in scored.admitted.items():
            if (counts := gained.get(credited(sources, order, _LAST))) is not None:
                counts[2] += count
        for source_index, (hits, own, nodes) in gained.items():
            self._gains[source_index].learn(hits, own, nodes)
        return accepted

    def _order(self) -> dict[int, Order]:
        """Where each source stands when several have drafted one node; the least takes the credit.

        What a proposer inside the worker finds costs nothing, so it comes first. Then come remote sources,
        the best first. Behind them come those that are tried after a rest: they have to add to what is there,
        or two equal sources would take turns at resting. Batched proposers come behind: they draft only to
        add. What continues other sources' drafts comes last: without them there would be nothing to continue.
        """
        order = {active.source_index: (0, 0, 0) for active in self._proposers}
        for source_index, address in self._at.items():
            on_trial = address.throttle.on_trial
            order[source_index] = (1 + on_trial, -self._gains[source_index].grade, source_index)
        if self._below is not None:
            order[self._below.source_index] = _BELOW
        return order

    def published(self, now_ms: float, bare: bool) -> None:
        """Notes that the last round was sent: the time until each source's next draft counts from now on.

        `bare` says that no drafted node outlived the round.
        """
        self._round_ms = now_ms - self._published_ms if self._published_ms else 0.0
        self._published_ms = now_ms
        for latency in self.latencies.values():
            latency.committed(now_ms, bare)

    def _cuts(self, name: str) -> LocalDrafts | None:
        return self._reputations.local_drafts(self._policy, name)


def _standing(
    inside: Sequence[SourceState], addresses: Sequence[SourcesAtAddress], remote: _Remote
) -> Standing:
    states = [
        SourceState(index, rest, slowdown)
        for address, (rest, slowdown) in zip(addresses, remote, strict=True)
        for index in sorted(address.indices)
    ]
    resting = frozenset([state.source for state in states if state.rest != Rest.NONE])
    return Standing((*inside, *states), resting)
