"""The proposers that draft for one session from its own text, and when each of them rests.

A proposer takes microseconds, but each of them comes between two passes of the target, and reads memory that
the pass has evicted from the processor's caches. Where a pass takes a millisecond, a proposer whose drafts
gain nothing costs some percent. So it rests by the rule for remote sources, with three differences. Each
session counts for itself: whether a text repeats itself says little about the next one. Rests are short,
since an answer may begin to copy at any time. And a proposer's price is the time that it takes itself.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from outrider.wire.names import GRAMMAR
from speculative.draft import Draft
from speculative.marginal import SourceGain
from speculative.tree import ROOT
from verifier_service.engine.source_policy import Reputation
from verifier_service.observe.round_log import Rest, SourceState
from verifier_service.proposers import PROPOSERS, Proposer, ProposerInit, make_proposer
from verifier_service.proposers.own_text.lookup import MOST_READ
from verifier_service.proposers.own_text.record import SourceRecord
from verifier_service.remote_sources.source_rests import SourceThrottle

Worth = Callable[[int, float], float]
"""The calibrated probability that a source's node is accepted, of the source's index and its estimate."""

_OFFERED_EVERY = 8
"""Of as many drafts whose nodes are worth less than their rows cost, one is offered: its fate may correct
what such drafts are taken to be worth."""
_MOST_REST = 64
"""The longest rest, in steps: a copy that begins meanwhile is drafted at most this many steps late."""
_CREDIT_ROUNDS = 256.0
"""Rounds for which a proposer that has saved some eight rounds may then save none: copies come in turns."""


class ActiveProposer:
    """A proposer in use by one session.

    Args:
        source_index: index of the proposer among the session's sources, from 1.
        record: what the source saved in earlier sessions; None: the proposer never rests.
    """

    __slots__ = (
        "_appended",
        "_has_drafted",
        "_is_new",
        "_proposer",
        "_record",
        "_states",
        "_throttle",
        "_was_asked",
        "source_index",
    )

    def __init__(self, source_index: int, proposer: Proposer, record: SourceRecord | None) -> None:
        self.source_index = source_index
        self._proposer = proposer
        self._appended = 0
        """How many of the session's leading tokens the proposer has."""
        self._record = record
        self._throttle = (
            None if record is None else SourceThrottle(record.activity(), _MOST_REST, _CREDIT_ROUNDS)
        )
        self._was_asked = False
        """Whether the proposer was asked for a draft since the last round."""
        self._has_drafted = False
        """Whether it drafted since then, be the draft offered or not."""
        self._is_new = True
        """Whether the next draft is the session's first, which is not timed: it reads the prompt."""
        self._states = {rest: SourceState(source_index, rest, None) for rest in Rest}

    @property
    def is_resting(self) -> bool:
        """Whether the proposer is not asked now."""
        return self._throttle is not None and self._throttle.resting

    @property
    def state(self) -> SourceState:
        """How the source stands."""
        if not self.is_resting:
            return self._states[Rest.NONE]
        is_spared = self._throttle is not None and self._throttle.is_spared
        return self._states[Rest.NOT_ADMITTED if is_spared else Rest.GAINS_TOO_LITTLE]

    @property
    def may_rest(self) -> bool:
        """Whether the proposer rests at all."""
        return self._throttle is not None

    def propose(self, ids: Sequence[int], end: int, node_limit: int) -> Draft | None:
        """Gives the proposer the first `end` of the session's ids, in steps of `MOST_READ` ids.

        Returns what the proposer drafts behind all ids; None before it has them.
        """
        if self.is_resting:
            return None
        end = min(end, self._appended + MOST_READ)
        self._proposer.append(ids[self._appended : end])
        self._appended = max(self._appended, end)
        if end != len(ids):
            return None
        self._was_asked = True
        return self._proposer.propose(node_limit)

    def took(self, ms: float, *, offers: bool) -> None:
        """Notes how long the proposer took to draft for the next round, the merging of an offer included."""
        if self._record is not None and self._was_asked:
            if not self._is_new:
                self._record.took(ms, offers=offers)
            self._is_new = False

    def holds_back(self, draft: Draft, worth: Worth, least: float) -> bool:
        """Decides whether a draft is held back, so not offered; to be called once per draft.

        A draft is worthless if the target accepts each of its first nodes less often than `least`, the
        survival that pays for a row. Most worthless drafts are held back, but none in a trial after a rest.
        """
        self._has_drafted = True
        if self._record is None or self._throttle is None or not self._is_worthless(draft, worth, least):
            return False
        self._record.worthless += 1
        return not self._throttle.on_trial and self._record.worthless % _OFFERED_EVERY != 1

    def _is_worthless(self, draft: Draft, worth: Worth, least: float) -> bool:
        index = self.source_index
        if worth(index, draft.survival[0]) >= least:
            return False
        others = zip(draft.parents[1:], draft.survival[1:], strict=True)
        return not any(parent == ROOT and worth(index, survival) >= least for parent, survival in others)

    def committed(
        self, saved: float, *, spared: bool, batch: int, step: int, right: bool, pass_ms: float = 0.0
    ) -> None:
        """Notes a committed round; the arguments are as `SourceThrottle.committed` takes them.

        `pass_ms` is how long the step's forward took, in milliseconds; 0: that was not measured.
        """
        throttle, record = self._throttle, self._record
        if throttle is None or record is None:
            return
        if throttle.resting and not saved:
            throttle.rested(batch, step)
        elif self._was_asked or saved:
            # A session alone has no crowd that would end the rest, and its step admits what is worth its row.
            spared &= batch > 1
            if not (self._has_drafted and spared):
                record.learn(saved)
            price = record.charge(batch, pass_ms)
            throttle.committed(saved, self._has_drafted, spared, batch, step, price=price, right=right)
        self._was_asked = self._has_drafted = False


class SessionProposers:
    """The proposers in use by one session, by source index.

    Args:
        init: what proposers need to know of the request.
    """

    __slots__ = ("_active", "_init")

    def __init__(self, init: ProposerInit) -> None:
        self._init = init
        self._active: list[ActiveProposer] = []

    def __iter__(self) -> Iterator[ActiveProposer]:
        return iter(self._active)

    def use(self, inside: Mapping[str, int], reputations: Sequence[Reputation]) -> None:
        """Changes the proposers; one that drafted before goes on where it was.

        Args:
            inside: source index of each source in use inside this worker, by name.
            reputations: what earlier sessions taught about each source, by source index less 1.
        """
        known = {active.source_index: active for active in self._active}
        self._active = [
            known.get(source_index) or self._made(name, source_index, reputations[source_index - 1])
            for name, source_index in sorted(inside.items(), key=lambda each: each[1])
            if name in PROPOSERS
        ]

    def committed(
        self,
        own: Mapping[int, int],
        gains: Mapping[int, SourceGain],
        row: float,
        *,
        spared: bool,
        batch: int,
        step: int,
        pass_ms: float = 0.0,
    ) -> None:
        """Notes a committed round.

        Args:
            own: accepted tokens that count for each source alone, by source index.
            gains: what each source has gained, by source index.
            row: part of a round that the row of an admitted node costs.
            spared: whether there were drafts, and the step admitted none of their nodes.
            batch: sessions in the step.
            step: the step's number.
            pass_ms: milliseconds that the step's forward took; 0: that was not measured.
        """
        for active in self._active:
            index = active.source_index
            gain = gains[index]
            saved = own[index] * gain.net(row) if index in own else 0.0
            right = gain.often_right
            active.committed(saved, spared=spared, batch=batch, step=step, right=right, pass_ms=pass_ms)

    @property
    def states(self) -> list[SourceState]:
        """How those that may rest stand."""
        return [active.state for active in self._active if active.may_rest]

    def _made(self, name: str, source_index: int, reputation: Reputation) -> ActiveProposer:
        # What a grammar forces is always right, however seldom it forces anything.
        record = None if name == GRAMMAR else reputation.record
        return ActiveProposer(source_index, make_proposer(name, self._init), record)
