"""Has the proposers with planes fill the slots that passes commit: at once, several passes together, or not.

While proposers rest for long, nobody fills slots. The blocks of such passes are noted, and no proposer drafts
for a session that has one of them. So after the rest proposers draft for sessions that have begun since,
unless their prompt begins with such blocks.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from outrider.lm.kv.blocks import BLOCK
from verifier_service.engine.session import Session
from verifier_service.engine.session_pool import SessionPool
from verifier_service.proposers.planes.held_passes import HeldPasses, Seen, ShownPasses
from verifier_service.proposers.planes.last_features import LastFeatures, RowsKept
from verifier_service.proposers.planes.proposer_planes import slots_of_runs

Show = Callable[[ShownPasses], None]


class PlaneFilling:
    """Shows passes to the proposers with planes, and keeps the hidden states that the next pass continues.

    Args:
        sessions: all sessions of the worker.
        layers: number of layers whose hidden states a pass keeps.
        show: shows one pass, or several in one piece, to the proposers with planes.
    """

    def __init__(self, sessions: SessionPool, layers: int, show: Show) -> None:
        self._sessions = sessions
        self._pool = sessions.kv.pool
        self._pool.copying_blocks = self._copying
        self._last = LastFeatures(self._pool, layers)
        self._show = show
        self._held = HeldPasses()
        self._holds = False
        self.skips = False
        """Whether the pass is not shown, and its slots stay unfilled."""
        self._unfilled: set[int] = set()
        """Blocks with committed positions whose slots no proposer has filled."""
        self._filled: dict[int, tuple[Sequence[int], int]] = {}
        """Each session's blocks, by handle, and how many full ones are known to be filled; -1: one is not."""
        self._left_out: set[int] = set()
        """Sessions of the pass that have such blocks, by handle: their next slots stay unfilled as well."""

    def begin(self, ready: Sequence[Session], may_hold: bool, may_skip: bool = False) -> None:
        """Finds the hidden states that these sessions' next rows continue; forgets ended sessions.

        Call this before the proposers forget ended sessions.

        Args:
            may_hold: whether no proposer with planes is expected to draft: the pass may be shown later.
            may_skip: whether none is expected to draft for these sessions at all: the pass need not be shown.
        """
        self._holds, self.skips = may_hold, may_skip
        if len(self._filled) > len(self._sessions):
            present = {session.handle for session in self._sessions}
            self._filled = {handle: known for handle, known in self._filled.items() if handle in present}
        if may_skip:
            self.catch_up()
            return
        self._left_out = {session.handle for session in ready if not self.is_filled(session)}
        if may_hold and self._may_stay_held(ready) and len(self._last) <= len(self._sessions):
            return
        self.catch_up()
        self._last.keep_only({session.handle for session in self._sessions})
        for session in ready:
            if not self._knows_last(session) and session.handle not in self._left_out:
                block = self._sessions.kv.block(session, session.cached - 1)
                self._last.begin(session.handle, session.cached - 1, block)

    def missed(self, session: Session, first: int, end: int) -> None:
        """Notes that a session's positions `first` to `end - 1` stay unfilled."""
        self._unfilled.update(self._sessions.kv.blocks(session)[first // BLOCK : -(-end // BLOCK)])

    def saw(self, seen: Seen, features: Tensor | None) -> None:
        """Takes what a pass did."""
        if self.skips or self._unfilled:
            seen = self._to_be_filled(seen)
            if not seen:
                return
        rows = sum(len(shown.rows) for _, shown in seen)
        if not self._held.has_room(rows):
            self.catch_up()
        if self._holds and features is not None and self._held.has_room(rows):
            self._held.add(seen, features)
        else:
            self.catch_up()
            self._fill(ShownPasses(seen, features, 1))

    def _to_be_filled(self, seen: Seen) -> Seen:
        """The rounds whose slots get filled; notes the blocks of the others."""
        filled = []
        for session, shown in seen:
            slots = slots_of_runs(shown.runs)
            if self.skips or shown.handle in self._left_out:
                self._unfilled.update([slot // BLOCK for slot in slots])
            else:
                # A session fills a block from its first slot on, and holds the block alone until then.
                self._unfilled.difference_update([slot // BLOCK for slot in slots if slot % BLOCK == 0])
                filled.append((session, shown))
        return filled

    def catch_up(self) -> None:
        """Shows the passes that were held; nothing may read the planes before."""
        if self._held:
            held, self._held = self._held, HeldPasses()
            for piece in held.pieces():
                self._fill(piece)

    def begin_anew(self, tenant: str) -> None:
        """Notes that nothing of a tenant is filled any more, as other weights fill slots from now on.

        Sessions that have computed positions are drafted for no more; nobody may begin with cached blocks.
        An empty name means all tenants.
        """
        kv = self._sessions.kv
        for session in self._sessions:
            if tenant in ("", session.key.tenant):
                self._unfilled.update(kv.blocks(session))
        self._filled.clear()

    def close(self) -> None:
        """Forgets everything: no proposer with planes is left."""
        self._pool.copying_blocks = lambda sources, targets: None
        self._held = HeldPasses()
        self._last.keep_only(())

    def feature(self, session: Session) -> Tensor | None:
        """Hidden states of the position before a session's last token; None: no proposer can draft.

        A session that gave its blocks up computes its positions again, whatever is known of them.
        """
        if session.uncomputed > 1 or not self.is_filled(session):
            return None
        return self._last.at(session.handle, len(session.ids) - 2)

    def is_filled(self, session: Session) -> bool:
        """Whether the slots of all computed positions of a session are filled, or held to be filled."""
        if not self._unfilled:
            return True
        blocks = self._sessions.kv.blocks(session)
        known, filled = self._filled.get(session.handle, (blocks, 0))
        if known is not blocks:  # the session gave its blocks up, and has others now
            filled = 0
        if filled >= 0:
            # Blocks that are full stay as they are, and a session with a gap keeps it: long contexts are not
            # looked through in every step.
            newest = blocks[filled : -(-session.cached // BLOCK)]
            filled = session.cached // BLOCK if self._unfilled.isdisjoint(newest) else -1
            self._filled[session.handle] = blocks, filled
        return filled >= 0

    def _copying(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Prepares for a copy of blocks: what is copied has to be filled, or noted."""
        self.catch_up()
        for source, into in zip(sources, targets, strict=True):
            (self._unfilled.add if source in self._unfilled else self._unfilled.discard)(into)

    def _fill(self, piece: ShownPasses) -> None:
        # Copies that commits put off would overwrite what is written now.
        self._pool.settle()
        last = self._last
        seen = [
            (session, shown._replace(before=last.at(shown.handle, shown.first - 1)))
            for session, shown in piece.seen
        ]
        self._show(piece._replace(seen=seen))
        if piece.features is not None:
            last.keep(
                [RowsKept(one.handle, one.first, one.rows, one.runs) for _, one in seen], piece.features
            )

    def _may_stay_held(self, ready: Sequence[Session]) -> bool:
        """Whether what is held is of sessions that go on, and all that the others continue is known."""
        if self._held.has_ended_sessions(self._sessions.get):
            return False
        for session in ready:
            if session.handle in self._left_out:
                continue
            end = self._held.end(session.handle)
            known = end == session.cached if end is not None else self._knows_last(session)
            if not known:
                return False
        return True

    def _knows_last(self, session: Session) -> bool:
        """Whether the hidden states that the session's next row continues are at hand."""
        return not session.cached or self._last.at(session.handle, session.cached - 1) is not None
