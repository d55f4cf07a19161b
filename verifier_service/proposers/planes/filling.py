"""Has the proposers with planes fill the slots that passes commit: at once, or several passes together."""

from collections.abc import Callable, Sequence

from torch import Tensor

from verifier_service.engine.session import Session
from verifier_service.engine.session_pool import SessionPool
from verifier_service.proposers.planes.held_passes import HeldPasses, Seen, ShownPasses
from verifier_service.proposers.planes.last_features import LastFeatures, RowsKept

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
        self._pool.copying_blocks = self.catch_up  # what is copied has to be filled
        self._last = LastFeatures(self._pool, layers)
        self._show = show
        self._held = HeldPasses()
        self._holds = False

    def begin(self, ready: Sequence[Session], may_hold: bool) -> None:
        """Finds the hidden states that these sessions' next rows continue; forgets ended sessions.

        Call this before the proposers forget ended sessions.

        Args:
            may_hold: whether no proposer with planes is expected to draft: the pass may be shown later.
        """
        self._holds = may_hold
        if may_hold and self._may_stay_held(ready) and len(self._last) <= len(self._sessions):
            return
        self.catch_up()
        self._last.keep_only({session.handle for session in self._sessions})
        for session in ready:
            if not self._knows_last(session):
                block = self._sessions.kv.block(session, session.cached - 1)
                self._last.begin(session.handle, session.cached - 1, block)

    def saw(self, seen: Seen, features: Tensor | None) -> None:
        """Takes what a pass did."""
        rows = sum(len(shown.rows) for _, shown in seen)
        if not self._held.has_room(rows):
            self.catch_up()
        if self._holds and features is not None and self._held.has_room(rows):
            self._held.add(seen, features)
        else:
            self.catch_up()
            self._fill(ShownPasses(seen, features, 1))

    def catch_up(self) -> None:
        """Shows the passes that were held; nothing may read the planes before."""
        if self._held:
            held, self._held = self._held, HeldPasses()
            for piece in held.pieces():
                self._fill(piece)

    def close(self) -> None:
        """Forgets everything: no proposer with planes is left."""
        self._pool.copying_blocks = lambda: None
        self._held = HeldPasses()
        self._last.keep_only(())

    def feature(self, session: Session) -> Tensor | None:
        """Hidden states of the position before a session's last token; None: yet to be computed.

        A session that gave its blocks up computes its positions again, whatever is known of them.
        """
        return None if session.uncomputed > 1 else self._last.at(session.handle, len(session.ids) - 2)

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
            end = self._held.end(session.handle)
            known = end == session.cached if end is not None else self._knows_last(session)
            if not known:
                return False
        return True

    def _knows_last(self, session: Session) -> bool:
        """Whether the hidden states that the session's next row continues are at hand."""
        return not session.cached or self._last.at(session.handle, session.cached - 1) is not None
