"""What the last rounds of each session were, for whoever asks why a request went as it did.

A round's record holds on to what the step has made anyway; what it means is worked out when somebody asks.
Bounded in rounds, over all sessions. Pure: written by whoever has a round, read by the same.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from outrider.wire.codec import SessionKey
from speculative.commit import FinishReason

MOST_ROUNDS = 32_768
"""Of all sessions together; some 600 bytes each."""
MOST_OF_A_SESSION = 512


@dataclass(frozen=True, slots=True)
class Step:
    """What a step was to all of its sessions; times are of time.perf_counter."""

    number: int
    began_s: float
    ended_s: float
    sessions: int
    rows: int
    waited_s: float


class Record(NamedTuple):
    """One round of one session."""

    step: Step
    position: int
    """Ids before the first committed one."""
    pending: int
    """Committed ids that the step computed."""
    prompt_passes: int
    """Steps before it that computed parts of the prompt alone."""
    candidates: int
    """Nodes to choose from."""
    admitted: tuple[int, ...]
    """Credit index of each node in the step."""
    credits: bytes
    """Of the committed ids: 0 the target itself."""
    drafted: Mapping[int, int]
    """Nodes offered so far, by credit index."""


class Share(NamedTuple):
    """What one source had to do with a round; counts are of nodes."""

    source: int
    """Its credit index."""
    drafted: int
    admitted: int
    accepted: int


@dataclass(slots=True)
class Entry:
    """A session under one epoch."""

    key: SessionKey
    epoch: int
    prompt_length: int
    node_limit: int
    opened_s: float
    source_names: tuple[str, ...] = ()
    finished: FinishReason | None = None
    rounds: deque[Record] = field(default_factory=deque)
    forgotten: int = 0
    _before: Mapping[int, int] = field(default_factory=dict)
    """What had been drafted before the oldest round that is kept."""

    def add(self, record: Record, most: int) -> int:
        """One more round; returns by how many rounds it grew."""
        self.rounds.append(record)
        if len(self.rounds) <= most:
            return 1
        self._before = self.rounds.popleft().drafted
        self.forgotten += 1
        return 0

    def shares(self) -> Iterator[tuple[Record, list[Share]]]:
        """Each round, and what the sources had to do with it."""
        before = self._before
        for record in tuple(self.rounds):
            yield record, _shares(record, before)
            before = record.drafted


class Journal:
    """Of the sessions of a worker.

    Args:
        most: rounds that are kept, of all sessions.
        most_of_a_session: of one of them.
    """

    def __init__(self, most: int = MOST_ROUNDS, most_of_a_session: int = MOST_OF_A_SESSION) -> None:
        self._most = most
        self._most_of_a_session = most_of_a_session
        self._entries: OrderedDict[tuple[SessionKey, int], Entry] = OrderedDict()
        self._rounds = 0

    def opened(self, entry: Entry) -> None:
        """A session begins; one that was parked goes on where it was."""
        self._entries.setdefault((entry.key, entry.epoch), entry)
        self._shrink()

    def add(
        self,
        key: SessionKey,
        epoch: int,
        record: Record | None,
        source_names: tuple[str, ...],
        finished: FinishReason | None,
    ) -> None:
        """A session had a round, or ended; nothing where it is known no longer."""
        entry = self._entries.get((key, epoch))
        if entry is None:
            return
        entry.source_names = source_names
        if record is not None:
            self._rounds += entry.add(record, self._most_of_a_session)
        if finished is not None:
            entry.finished = finished
            self._entries.move_to_end((key, epoch))
        if self._rounds > self._most:
            self._shrink()

    def find(self, key: SessionKey) -> list[Entry]:
        """All that is known of a session, the latest epoch last."""
        found = [entry for entry in self._entries.values() if entry.key == key]
        return sorted(found, key=lambda entry: entry.epoch)

    def __len__(self) -> int:
        """Rounds that are kept."""
        return self._rounds

    def _shrink(self) -> None:
        """Forgets whole sessions, those first that ended longest ago, then those opened longest ago."""
        while self._rounds > self._most or len(self._entries) > self._most:
            oldest = islice(self._entries.items(), self._most_of_a_session)
            name = next((name for name, entry in oldest if entry.finished is not None), None)
            entry = self._entries.pop(next(iter(self._entries)) if name is None else name)
            self._rounds -= len(entry.rounds)


def _shares(record: Record, before: Mapping[int, int]) -> list[Share]:
    admitted, accepted = Counter(record.admitted), Counter(record.credits)
    shares = [
        Share(source, _since(count, before.get(source, 0)), admitted[source], accepted[source])
        for source, count in sorted(record.drafted.items())
    ]
    return [share for share in shares if any(share[1:])]


def _since(count: int, before: int) -> int:
    """A session that was parked counts from nothing again."""
    return count - before if count >= before else count
