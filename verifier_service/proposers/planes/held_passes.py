"""What passes did while the proposers with planes rest, kept to be shown to them in one piece.

A proposer with planes has to fill the slots of every committed token, also while its drafts do not pay. The
slots of many passes are filled at once in little more time than those of one pass.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.lm.kv.blocks import BLOCK
from outrider.lm.kv.pool import Run
from verifier_service.engine.session import Session
from verifier_service.proposers.batched import SeenRound
from verifier_service.proposers.planes.last_features import selected

MOST_ROWS = 128
"""Rows that are held at most; a call for more would keep the engine waiting."""

Seen = Sequence[tuple[Session, SeenRound]]


@dataclass(slots=True)
class _Held:
    """Rounds of one session that follow each other."""

    session: Session
    first: int
    rows: list[int] = field(default_factory=list)
    """Rows of the held hidden states, for each position from `first`."""
    runs: list[Run] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.first + len(self.rows)


class HeldPasses:
    """Rounds of several passes, merged by session, with copies of their hidden states."""

    def __init__(self) -> None:
        self._held: dict[int, _Held] = {}
        """By session handle."""
        self._blocks: dict[int, int] = {}
        """Handle of the session that has a held row in a block, by block."""
        self._features: list[Tensor] = []
        """Of each held pass."""
        self._rows = 0

    def __bool__(self) -> bool:
        return bool(self._held)

    @property
    def passes(self) -> int:
        """Number of held passes."""
        return len(self._features)

    @property
    def is_full(self) -> bool:
        """Whether no further pass should be held."""
        return self._rows >= MOST_ROWS

    def end(self, handle: int) -> int | None:
        """Position behind a session's last held row; None: none is held."""
        held = self._held.get(handle)
        return None if held is None else held.end

    def outlives(self, get: Callable[[int], Session | None]) -> bool:
        """Whether rows are held of a session that has ended; `get` finds sessions by handle."""
        return any(get(handle) is not held.session for handle, held in self._held.items())

    def takes(self, seen: Seen) -> bool:
        """Whether these rounds go on where the held ones end, in slots that no other session had before."""
        for _, shown in seen:
            if self.end(shown.handle) not in (None, shown.first):
                return False
            if any(self._blocks.get(block, shown.handle) != shown.handle for block in _blocks(shown.runs)):
                return False
        return True

    @torch.inference_mode()
    def add(self, seen: Seen, features: Tensor) -> None:
        """Holds the rounds of one more pass; copies their rows of `features`, [layers, rows, width]."""
        rows: list[int] = []
        for session, shown in seen:
            if not shown.rows:
                continue
            held = self._held.setdefault(shown.handle, _Held(session, shown.first))
            held.rows += range(self._rows + len(rows), self._rows + len(rows) + len(shown.rows))
            held.runs += shown.runs
            self._blocks.update(dict.fromkeys(_blocks(shown.runs), shown.handle))
            rows += shown.rows
        if rows:
            self._features.append(selected(features, rows))
            self._rows += len(rows)

    def merged(self) -> tuple[Seen, Tensor]:
        """All that is held, at least one row: a round of each session, without its tokens, and the rows."""
        seen = []
        for handle, held in self._held.items():
            rows, runs = tuple(held.rows), tuple(held.runs)
            seen.append((held.session, SeenRound(handle, held.end, (), None, held.first, rows, runs)))
        return seen, torch.cat(self._features, 1)


def _blocks(runs: Sequence[Run]) -> list[int]:
    return [block for low, high in runs for block in range(low // BLOCK, (high - 1) // BLOCK + 1)]
