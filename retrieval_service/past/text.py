"""One tenant's past outputs: whole sequences, looked up while they grow, the oldest given up first.

No threads, clocks or files. Memory: 4 bytes an id (8 with the compiled index), about 6 for its place in the
order, and some hundreds of bytes for each sequence (docs/past-outputs.md gives the measurement).
"""

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from retrieval_service.past.compiled_index import CompiledIndex, IndexLibrary
from retrieval_service.past.python_index import CONTEXT, PositionIndex, PythonIndex

ID_END = 2**31
"""Ids are below this."""

TOKEN_LIMIT_END = 2**28
"""Positions run out beyond."""

LEAST_COST = 64
"""Tokens that a sequence counts as at least, since its objects take memory however short it is."""

Held = tuple[int, str, "array[int]"]
"""A sequence: its serial, its session, its ids."""


@dataclass(frozen=True, slots=True)
class Added:
    """Ids added at `start` of sequence `serial`; replaying all of these gives the same text again."""

    serial: int
    session: str
    start: int
    ids: "array[int]"


class _Sequence:
    __slots__ = ("handle", "ids", "serial", "session")

    def __init__(self, serial: int, session: str, ids: "array[int]", handle: int) -> None:
        self.serial = serial
        self.session = session
        self.ids = ids
        self.handle = handle


class PastText:
    """The past outputs of one tenant's sessions, indexed for lookups.

    A session's ids are one sequence from its first `extend` to `finish` (or until it is evicted while it
    grows); later ids begin another. No match ever crosses two sequences.
    """

    def __init__(self, token_limit: int) -> None:
        self.token_limit = token_limit
        self.next_serial = 0
        self.tokens = 0
        self.cost = 0
        self.evicted = 0
        self._sequences: OrderedDict[int, _Sequence] = OrderedDict()
        self._of_session: dict[str, list[_Sequence]] = {}
        self._growing: dict[str, _Sequence] = {}
        self._leaving: deque[_Sequence] = deque()
        self._index: PositionIndex = PythonIndex()

    def extend(self, session: str, ids: Sequence[int]) -> Added | None:
        """Append committed ids to a session's sequence; None where there are no ids.

        Raises ValueError for an invalid id, and then takes none of the ids.
        """
        new = checked(ids)
        if not new:
            return None
        sequence = self._growing.get(session)
        if sequence is None:
            sequence = self._growing[session] = self._open(self.next_serial, session, array("I"))
        start = len(sequence.ids)
        sequence.ids.extend(new)
        self.tokens += len(new)
        self.cost += max(len(sequence.ids), LEAST_COST) - max(start, LEAST_COST)
        self._index.extend(sequence.handle, new)
        return Added(sequence.serial, session, start, new)

    def finish(self, session: str) -> None:
        """End a session's sequence; unknown sessions are ignored."""
        sequence = self._growing.pop(session, None)
        if sequence is not None:
            # An equal array without the room to grow.
            sequence.ids = sequence.ids[:]
            self._index.finish(sequence.handle, sequence.ids)

    def restore(self, sequences: Iterable[Held], next_serial: int) -> None:
        """Fill an empty text with the latest of these finished sequences, serials rising, that fit."""
        for serial, session, ids in fitting(sequences, self.token_limit):
            self._open(serial, session, ids)
        self.next_serial = max(self.next_serial, next_serial)
        assert isinstance(self._index, PythonIndex), "a text is filled before its index is compiled"
        self._index.load([sequence.handle for sequence in self._sequences.values()])

    def use(self, library: IndexLibrary) -> None:
        """Go on with a compiled index, which finds what this one finds. Raises MemoryError."""
        if isinstance(self._index, PythonIndex):
            index, handles = CompiledIndex.of(library, self._index)
            for sequence in (*self._sequences.values(), *self._leaving):
                sequence.handle = handles[sequence.handle]
            self._index = index

    def read(self, ids: Sequence[int], depth: int) -> tuple[int, list[tuple[int, ...]]]:
        """Length of the longest suffix of `ids` found, and up to `depth` ids after each of its occurrences.

        At most CONTEXT ids are matched, and at most READ occurrences are read.
        """
        suffix = _latest_first(ids)
        if not suffix or depth < 1:
            return 0, []
        length, found = self._index.read(suffix)
        return length, [tuple(text[after : after + depth]) for text, after in found]

    def give_up_oldest(self) -> bool:
        """Begin to drop the oldest sequence, a growing one too; False where there is none."""
        if not self._sequences:
            return False
        oldest = next(iter(self._sequences.values()))
        self.evicted += len(oldest.ids)
        self._leave(oldest)
        return True

    def forget(self, session: str) -> int:
        """Begin to drop a session's sequences; returns the number of their ids."""
        sequences = list(self._of_session.get(session, ()))
        for sequence in sequences:
            self._leave(sequence)
        return sum(len(sequence.ids) for sequence in sequences)

    @property
    def leaving(self) -> bool:
        """Whether text is still to be dropped."""
        return bool(self._leaving)

    def tidy(self, steps: int) -> bool:
        """Evict beyond the limit, and drop up to `steps` positions; returns whether more are to be dropped.

        In steps, so that a caller holds its lock for a moment only.
        """
        while self.cost > self.token_limit:
            self.give_up_oldest()
        while steps > 0 and self._leaving:
            sequence = self._leaving[0]
            taken = self._index.remove(sequence.handle, steps)
            if taken < steps:
                self._index.close(sequence.handle)
                self._leaving.popleft()
                taken += 1
            steps -= taken
        return bool(self._leaving)

    def held(self) -> list[tuple[int, str, "array[int]", int]]:
        """Serial, session, ids and number of ids of each sequence, oldest first; the ids may still grow."""
        return [(one.serial, one.session, one.ids, len(one.ids)) for one in self._sequences.values()]

    def sequences(self) -> list[Held]:
        """Serial, session and a copy of the ids of each sequence, oldest first."""
        return [(serial, session, ids[:size]) for serial, session, ids, size in self.held()]

    def __len__(self) -> int:
        return len(self._sequences)

    def _open(self, serial: int, session: str, ids: "array[int]") -> _Sequence:
        sequence = _Sequence(serial, session, ids, self._index.open(ids))
        self.next_serial = serial + 1
        self._sequences[serial] = sequence
        self._of_session.setdefault(session, []).append(sequence)
        self.tokens += len(ids)
        self.cost += max(len(ids), LEAST_COST)
        return sequence

    def _leave(self, sequence: _Sequence) -> None:
        del self._sequences[sequence.serial]
        of_session = self._of_session[sequence.session]
        of_session.remove(sequence)
        if not of_session:
            del self._of_session[sequence.session]
        if self._growing.get(sequence.session) is sequence:
            del self._growing[sequence.session]
        self.tokens -= len(sequence.ids)
        self.cost -= max(len(sequence.ids), LEAST_COST)
        self._leaving.append(sequence)


def fitting(sequences: Iterable[Held], token_limit: int) -> list[Held]:
    """The latest sequences that fit the token limit, oldest first."""
    kept = []
    for one in reversed(list(sequences)):
        token_limit -= max(len(one[2]), LEAST_COST)
        if token_limit < 0:
            break
        kept.append(one)
    return kept[::-1]


def checked(ids: Sequence[int]) -> "array[int]":
    """The ids as an array. Raises ValueError, which names the first invalid id."""
    try:
        whole = array("I", ids)
    except OverflowError:
        whole = None
    if whole is not None and max(whole, default=0) < ID_END:
        return whole
    at, token = next((at, token) for at, token in enumerate(ids) if not 0 <= token < ID_END)
    raise ValueError(f"id {token} at {at} is not within 0 .. {ID_END - 1}: nothing was kept of these ids")


def _latest_first(ids: Sequence[int]) -> "array[int]":
    """The last CONTEXT ids, latest first, up to an invalid id, which no text holds."""
    latest: array[int] = array("I")
    for token in reversed(ids[-CONTEXT:]):
        if not 0 <= token < ID_END:
            break
        latest.append(token)
    return latest
