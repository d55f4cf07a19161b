"""The proposers that draft for one session from its own tokens, and when each of them rests.

A proposer takes microseconds, but each of them comes between two passes of the target, and touches memory
that the pass has driven from the processor's caches. Where a pass takes a millisecond, a proposer whose
drafts gain nothing costs some percent. So it is left alone for a while, by the rule for remote sources, but
session by session: whether a text repeats itself says little about the next one.
"""

from collections.abc import Iterator, Mapping, Sequence

from outrider.wire.names import GRAMMAR
from speculative.draft import Draft
from speculative.marginal import SourceGain
from verifier_service.engine.source_policy import Reputation
from verifier_service.observe.round_log import Rest, SourceState
from verifier_service.proposers import PROPOSERS, Proposer, ProposerInit, make_proposer
from verifier_service.remote_sources.source_rests import SourceRecord, SourceThrottle

_OFFERED = 8
"""Of as many drafts of a source that are worth less than their rows, one is offered: its fate may correct
what such drafts are taken to be worth."""


class ActiveProposer:
    """A proposer in use by one session.

    Args:
        source_index: index of the proposer among the session's sources, from 1.
        record: what the source saved in earlier sessions; None: the proposer never rests.
    """

    __slots__ = ("_appended", "_asked", "_proposer", "_record", "_throttle", "_worthless", "source_index")

    def __init__(self, source_index: int, proposer: Proposer, record: SourceRecord | None) -> None:
        self.source_index = source_index
        self._proposer = proposer
        self._appended = 0
        """How many of the session's leading tokens the proposer has."""
        self._worthless = 0
        """Number of its drafts so far whose first node was worth less than a row."""
        self._record = record
        self._throttle = None if record is None else SourceThrottle(record.activity())
        self._asked = False
        """Whether the proposer was asked for a draft since the last round."""

    @property
    def rests(self) -> bool:
        """Whether the proposer is not asked now."""
        return self._throttle is not None and self._throttle.resting

    def propose(self, ids: Sequence[int], end: int, node_limit: int) -> Draft | None:
        """Gives the proposer the first `end` of the session's ids; returns what it drafts behind all ids."""
        if self.rests:
            return None
        self._proposer.append(ids[self._appended : end])
        self._appended = max(self._appended, end)
        if end != len(ids):
            return None
        self._asked = True
        return self._proposer.propose(node_limit)

    def holds_back(self, worth: float, least: float) -> bool:
        """Whether a draft is not offered, as its first node is worth less than the `least` that rows cost."""
        if worth >= least:
            return False
        self._worthless += 1
        return self._worthless % _OFFERED > 0

    def committed(self, saved: float, *, batch: int, step: int, right: bool) -> None:
        """Notes a round; `saved` and the others are as `SourceThrottle.committed` takes them."""
        throttle, record = self._throttle, self._record
        if throttle is None or record is None:
            return
        if throttle.resting and not saved:
            throttle.rested(batch, step)
        elif self._asked or saved:
            record.learn(saved)
            throttle.committed(saved, batch=batch, step=step, right=right)
        self._asked = False


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
        batch: int,
        step: int,
    ) -> None:
        """Notes a committed round.

        Args:
            own: accepted tokens that count for each source alone, by source index.
            gains: what each source has gained, by source index.
            row: part of a round that the row of an admitted node costs.
            batch: sessions in the step.
            step: the step's number.
        """
        for active in self._active:
            index = active.source_index
            gain = gains[index]
            saved = own[index] * gain.net(row) if index in own else 0.0
            active.committed(saved, batch=batch, step=step, right=gain.often_right)

    @property
    def states(self) -> tuple[SourceState, ...]:
        """How those that rest stand."""
        return tuple(
            [
                SourceState(active.source_index, Rest.GAINS_TOO_LITTLE, None)
                for active in self._active
                if active.rests
            ]
        )

    def _made(self, name: str, source_index: int, reputation: Reputation) -> ActiveProposer:
        # What a grammar forces is always right, however seldom it forces anything.
        record = None if name == GRAMMAR else reputation.record
        return ActiveProposer(source_index, make_proposer(name, self._init), record)
