"""Passages: runs of committed ids with what the target said at each place, bounded in bytes.

Nothing of a passage is written to the disk: passages live in this process, and go to a lesson's child through
a pipe.
"""

import io
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

EXAM_SHARE = 0.25
"""Share of the bytes that passages for scoring get; nothing is ever trained on these."""


@dataclass(frozen=True, slots=True, eq=False)
class Passage:
    """A run of places of one session, after the ids that lead up to it.

    Attributes:
        tenant: the session's tenant.
        session: a number for the session; passages of one session count as one sample.
        start: absolute position of `ids[0]`.
        ids: uint32 [context + places]; the places are the last ones.
        top_ids: uint32 [places, k], the target's likeliest ids at each place, likeliest first; k is 0 where
            the lesson works them out itself.
        top_logprobs: float16 [places, k], their log-probabilities under the raw logits.
        wrong: bool [places], whether the committed id was not drafted.
    """

    tenant: str
    session: int
    start: int
    ids: NDArray[np.uint32]
    top_ids: NDArray[np.uint32]
    top_logprobs: NDArray[np.float16]
    wrong: NDArray[np.bool_]

    @property
    def places(self) -> int:
        """Number of places to learn from or to score."""
        return len(self.wrong)

    @property
    def nbytes(self) -> int:
        """Size in memory, in bytes; the objects around the arrays are counted at 512."""
        arrays = (self.ids, self.top_ids, self.top_logprobs, self.wrong)
        return 512 + sum(array.nbytes for array in arrays)


class PassageBuffer:
    """Passages to learn from and passages to score with, at most `most_bytes` together. Safe from any thread.

    A full buffer drops the oldest passage of the tenant that holds most, so that no tenant can crowd another
    one out of what the public's weights learn and are scored with.
    """

    def __init__(self, most_bytes: int) -> None:
        self._lock = threading.Lock()
        exams = int(most_bytes * EXAM_SHARE)
        self._lessons, self._exams = _Room(most_bytes - exams), _Room(exams)
        self._fresh = 0

    def add(self, passage: Passage, *, exam: bool) -> None:
        """Keeps a passage; one without a wrong place teaches nothing and is kept for scoring alone."""
        with self._lock:
            if exam:
                self._exams.add(passage)
            elif passage.wrong.any():
                self._lessons.add(passage)
                self._fresh += int(passage.wrong.sum())

    @property
    def nbytes(self) -> int:
        """Bytes that the passages take."""
        with self._lock:
            return self._lessons.nbytes + self._exams.nbytes

    @property
    def fresh(self) -> int:
        """Wrong places that came since the last `take_fresh`."""
        with self._lock:
            return self._fresh

    def take_fresh(self) -> tuple[list[Passage], list[Passage]]:
        """Passages to learn from and passages to score with, oldest first; all of them stay in the buffer."""
        with self._lock:
            self._fresh = 0
            return self._lessons.passages(), self._exams.passages()


class _Room:
    """Passages of several tenants within a number of bytes."""

    def __init__(self, most: int) -> None:
        self.nbytes = 0
        self._most = most
        self._held: dict[str, int] = {}
        self._serial = 0
        self._kept: dict[str, deque[tuple[int, Passage]]] = {}

    def add(self, passage: Passage) -> None:
        if passage.nbytes > self._most:
            return
        self._serial += 1
        self._kept.setdefault(passage.tenant, deque()).append((self._serial, passage))
        self._count(passage.tenant, passage.nbytes)
        while self.nbytes > self._most:
            self._drop(max(self._held, key=lambda tenant: (self._held[tenant], tenant)))

    def passages(self) -> list[Passage]:
        return [one for _, one in sorted(chain(*self._kept.values()), key=lambda pair: pair[0])]

    def _drop(self, tenant: str) -> None:
        _, oldest = self._kept[tenant].popleft()
        self._count(tenant, -oldest.nbytes)
        if not self._kept[tenant]:
            del self._kept[tenant], self._held[tenant]

    def _count(self, tenant: str, change: int) -> None:
        self.nbytes += change
        self._held[tenant] = self._held.get(tenant, 0) + change


def to_bytes(passages: Sequence[Passage]) -> bytes:
    """Passages as bytes for a pipe; `from_bytes` reads them. Tenants are left out: a child needs none."""
    arrays: dict[str, NDArray[np.generic]] = {"count": np.array(len(passages))}
    for index, one in enumerate(passages):
        arrays |= {
            f"{index}.at": np.array([one.session, one.start]),
            f"{index}.ids": one.ids,
            f"{index}.top_ids": one.top_ids,
            f"{index}.top_logprobs": one.top_logprobs,
            f"{index}.wrong": one.wrong,
        }
    written = io.BytesIO()
    np.savez(written, **arrays)  # type: ignore[arg-type]
    return written.getvalue()


def from_bytes(data: bytes) -> list[Passage]:
    """The passages that `to_bytes` wrote, without their tenants. Raises ValueError for other bytes."""
    read = np.load(io.BytesIO(data), allow_pickle=False)
    found = []
    for index in range(int(read["count"])):
        session, start = read[f"{index}.at"].tolist()
        arrays = [read[f"{index}.{name}"] for name in ("ids", "top_ids", "top_logprobs", "wrong")]
        found.append(Passage("", session, start, *arrays))
    return found
