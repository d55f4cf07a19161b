"""Which of the passages kept for scoring a lesson scores, so that its cost does not grow with the buffer."""

from collections import Counter
from collections.abc import Sequence

from outrider.learning.judge import LEAST_OF_TENANT
from outrider.learning.passages import Passage

MOST_EXAMS = 256
"""Passages that each version reads. Four versions, the most that a lesson scores, read 1,024; the 480
passages of 60 steps of training cost 1,440, a step being three. More would make scoring the larger part. If
a fifth of 256 times 64 places change sides, the interval of the gain is at best 0.7 points to either side."""


def chosen_exams(kept: Sequence[Passage], most: int = MOST_EXAMS) -> list[Passage]:
    """At most `most` of the passages, of as many sessions as can be, the newest first chosen.

    Sessions are the judge's samples, so a session gives a second passage once every session of its tenant has
    given one. Tenants take turns of LEAST_OF_TENANT passages: no tenant crowds out the passages that show
    whether another tenant loses.

    Args:
        kept: passages, oldest first; so are those returned.
    """
    depths: Counter[int] = Counter()
    newest: dict[str, int] = {}
    found = []
    for age, one in enumerate(reversed(kept)):
        newest.setdefault(one.tenant, age)
        found.append((depths[one.session], age, one))
        depths[one.session] += 1
    given: Counter[str] = Counter()
    turns = []
    for _, age, one in sorted(found, key=lambda each: each[:2]):
        turns.append((given[one.tenant] // LEAST_OF_TENANT, newest[one.tenant], given[one.tenant], age))
        given[one.tenant] += 1
    ages = sorted((age for *_, age in sorted(turns)[:most]), reverse=True)
    return [kept[len(kept) - 1 - age] for age in ages]
