"""What passes did while the proposers with planes rest, kept to be shown to them in one piece.

A proposer with planes fills the slots of every committed token, but not in long rests (`filling.py`). The
slots of many passes are filled at once in little more time than those of one pass.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.lm.kv.pool import Run
from verifier_service.engine.session import Session
from verifier_service.proposers.batched import SeenRound
from verifier_service.proposers.planes.last_features import selected
from verifier_service.proposers.planes.proposer_planes import slots_of_runs

MOST_ROWS = 128
"""Rows that are held at most; a call for more would keep the engine waiting."""

Seen = Sequence[tuple[Session, SeenRound]]


class _Pass(NamedTuple):
    seen: Seen
    features: Tensor | NDArray[np.float32]
    """Hidden states of the rows of all rounds, one after the other, [layers, rows, width]."""


class ShownPasses(NamedTuple):
    """What one pass or several passes did, to be shown together."""

    seen: Seen
    features: Tensor | None
    passes: int


class HeldPasses:
    """Passes in their order, with copies of their hidden states."""

    def __init__(self) -> None:
        self._passes: list[_Pass] = []
        self._ends: dict[int, tuple[Session, int]] = {}
        """Each session of which rows are held, and the position behind the last, by handle."""
        self._rows = 0

    def __bool__(self) -> bool:
        return bool(self._passes)

    def has_room(self, rows: int) -> bool:
        """Whether a pass of this many rows may be held as well."""
        return self._rows + rows <= MOST_ROWS

    def end(self, handle: int) -> int | None:
        """Position behind a session's last held row; None: none is held."""
        held = self._ends.get(handle)
        return None if held is None else held[1]

    def has_ended_sessions(self, get: Callable[[int], Session | None]) -> bool:
        """Whether rows are held of a session that has ended; `get` finds sessions by handle."""
        return any(get(handle) is not session for handle, (session, _) in self._ends.items())

    def add(self, seen: Seen, features: Tensor) -> None:
        """Holds one more pass; copies the rows of its rounds of `features`, [layers, rows, width]."""
        # Little is done here: right after a pass each step of Python or torch takes several times as long.
        rows = [row for _, shown in seen for row in shown.rows]
        if rows:
            self._passes.append(_Pass(seen, _copied(features, rows)))
            self._ends.update({one.handle: (session, one.first + len(one.rows)) for session, one in seen})
            self._rows += len(rows)

    def pieces(self) -> Iterator[ShownPasses]:
        """All that is held, in as few pieces as there can be."""
        merging = _Merging()
        for held in self._passes:
            if not merging.takes(held.seen):
                yield merging.piece()
                merging = _Merging()
            merging.add(held)
        if merging.features:
            yield merging.piece()


@dataclass(slots=True)
class _Rounds:
    """Rounds of one session that follow each other."""

    session: Session
    first: int
    rows: list[int] = field(default_factory=list)
    """Rows of the held hidden states, for each position from `first`."""
    runs: list[Run] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.first + len(self.rows)


class _Merging:
    """Merges passes by session."""

    def __init__(self) -> None:
        self.features: list[Tensor] = []
        self._rounds: dict[int, _Rounds] = {}
        self._slots: set[int] = set()
        """Slots that get a row."""
        self._rows = 0

    def takes(self, seen: Seen) -> bool:
        """Whether a pass continues each session where the piece ends, in slots that get no row so far.

        A session that gave its blocks up may get one of them again, for the same positions or for others.
        """
        for _, shown in seen:
            before = self._rounds.get(shown.handle)
            if before is not None and before.end != shown.first:
                return False
            if not self._slots.isdisjoint(slots_of_runs(shown.runs)):
                return False
        return True

    def add(self, held: _Pass) -> None:
        """Adds a pass, which `takes` allows."""
        for session, shown in held.seen:
            if not shown.rows:
                continue
            rounds = self._rounds.setdefault(shown.handle, _Rounds(session, shown.first))
            rounds.rows += range(self._rows, self._rows + len(shown.rows))
            rounds.runs += shown.runs
            self._slots.update(slots_of_runs(shown.runs))
            self._rows += len(shown.rows)
        features = held.features
        self.features.append(torch.from_numpy(features) if isinstance(features, np.ndarray) else features)

    def piece(self) -> ShownPasses:
        """A round of each session, without its tokens, and the rows of all."""
        seen = []
        for handle, rounds in self._rounds.items():
            rows, runs = tuple(rounds.rows), tuple(rounds.runs)
            shown = SeenRound(handle, rounds.end, (), None, rounds.first, rows, runs)
            seen.append((rounds.session, shown))
        return ShownPasses(seen, torch.cat(self.features, 1), len(self.features))


def _copied(features: Tensor, rows: list[int]) -> Tensor | NDArray[np.float32]:
    if features.device.type == "cpu" and features.dtype is torch.float32:
        copied: NDArray[np.float32] = features.numpy()[:, rows]
        return copied
    with torch.inference_mode():
        return selected(features, rows)
