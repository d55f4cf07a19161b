"""Replays a snapshot's and a log's bytes: gives the sequences of the moment of the last record."""

from array import array
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field

from retrieval_service.past.records import Record, SnapshotEnd, unpack_header, unpack_records
from retrieval_service.past.text import Added, Held, fitting


@dataclass(slots=True)
class Replayed:
    """Replayed sequences by serial, rising, and the next serial."""

    sequences: "dict[int, tuple[str, array[int]]]" = field(default_factory=dict)
    next_serial: int = 0
    is_on_disk: bool = False
    """Whether the files hold these sequences, so that records may be appended to them."""

    def listed(self) -> list[Held]:
        """The sequences in the form that `PastText.restore` takes."""
        return [(serial, session, ids) for serial, (session, ids) in self.sequences.items()]

    def fit(self, token_limit: int) -> None:
        """Drop the oldest sequences beyond the token limit, as the text itself does."""
        self.sequences = {
            serial: (session, ids) for serial, session, ids in fitting(self.listed(), token_limit)
        }

    def forget(self, sessions: Container[str]) -> None:
        """Drop the sequences of these sessions."""
        self.sequences = {key: one for key, one in self.sequences.items() if one[0] not in sessions}


def read_snapshot(data: bytes, path: object) -> tuple[Replayed, bool]:
    """Sequences of a snapshot, and whether it is complete. Raises like `unpack_header`."""
    header, at = unpack_header(data, path)
    replayed = Replayed(next_serial=header.next_serial)
    for record, end in unpack_records(data, at, header.generation):
        if isinstance(record, Added):
            replayed.sequences[record.serial] = record.session, record.ids
        elif isinstance(record, SnapshotEnd):
            return replayed, end == len(data) and record.sequences == len(replayed.sequences)
    return replayed, False


def replay_log(replayed: Replayed, data: bytes, path: object) -> int:
    """Add a log's records to its snapshot's; returns the offset of the first invalid one.

    A snapshot may hold more than the log's beginning (it is taken while records wait to be written), so ids
    that are there already are not added again, and sequences that the snapshot had given up are skipped.
    Raises like `unpack_header`.
    """
    header, at = unpack_header(data, path)
    known = header.next_serial
    for record, end in unpack_records(data, at, header.generation):
        if not _take(replayed, record, known):
            break
        at = end
    return at


def _take(replayed: Replayed, record: Record, known: int) -> bool:
    """Apply a record; False where it does not fit the records before it."""
    if not isinstance(record, Added):
        return False
    if record.serial in replayed.sequences:
        ids = replayed.sequences[record.serial][1]
        if record.start > len(ids):
            return False
        ids.extend(record.ids[len(ids) - record.start :])
        return True
    if record.serial < known:
        return True
    if record.start:
        return False
    replayed.sequences[record.serial] = record.session, record.ids
    replayed.next_serial = max(replayed.next_serial, record.serial + 1)
    return True


def whole(sequences: Iterable[Held]) -> Iterator[Record]:
    """The records of a complete snapshot of these sequences."""
    count = tokens = 0
    for serial, session, ids in sequences:
        yield Added(serial, session, 0, ids)
        count += 1
        tokens += len(ids)
    yield SnapshotEnd(count, tokens)
