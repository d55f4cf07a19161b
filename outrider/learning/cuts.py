"""Where text is cut into passages, and which sessions are for scoring."""

from collections.abc import Iterator
from hashlib import blake2b
from typing import NamedTuple

PLACES = 64
"""Places of a passage, at most."""
CONTEXT = 192
"""Ids before the first place, at most."""
EXAM_EVERY = 4
"""About one session in this many is for scoring: lessons train on nothing of that session. A session's name
decides, so a session that comes anew stays where it was, and so do all answers to one prompt."""


class PassageCut(NamedTuple):
    """Positions of a passage within its session."""

    start: int
    """Position of the first id."""
    low: int
    """Position of the first place."""
    high: int
    """Position behind the last place."""


def cuts(first: int, end: int) -> Iterator[PassageCut]:
    """Cuts the places from position `first` to `end - 1` into passages; nothing comes before position 0."""
    for low in range(first, end, PLACES):
        start = max(0, low - CONTEXT)
        if start < low:
            yield PassageCut(start, low, min(end, low + PLACES))


def session_number(tenant: str, session: str) -> int:
    """A number that all choices of a session share, the same each time that the session comes."""
    return int.from_bytes(blake2b(f"{tenant}\0{session}".encode(), digest_size=6).digest())


def is_exam(number: int) -> bool:
    """Whether the session of this number is for scoring."""
    return number % EXAM_EVERY == 0
