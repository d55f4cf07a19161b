"""Which weights serve on: decided by acceptance on passages that nothing was trained on.

At a drafter's place, 1 is accepted where the drafter's likeliest id is the target's likeliest one, given the
committed ids before (teacher-forced). At a head's place a chain of greedy drafts begins, and its right ids
before the first wrong one are accepted, so that a head's acceptance may exceed 1. Places of one session
depend on each other, so sessions are the samples: the interval is that of a ratio estimator over sessions.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import NDArray

LEAST_SESSIONS = 8
"""Sessions below which no interval is believed."""
LEAST_OF_TENANT = 4
"""Sessions of one tenant below which the tenant's own interval is not believed."""
Reason = Literal["better", "earlier_better", "too_few", "not_better", "worse", "harms_tenant"]


@dataclass(frozen=True, slots=True)
class Score:
    """What of several versions is accepted on the same passages.

    Attributes:
        accepted: accepted ids by version, int [passages].
        places: int [passages].
        sessions: int [passages], the number of each passage's session.
        tenants: tenant of each passage.
    """

    accepted: Mapping[int, NDArray[np.int64]]
    places: NDArray[np.int64]
    sessions: NDArray[np.int64]
    tenants: Sequence[str]

    def acceptance(self, version: int) -> float:
        """Accepted ids of a version per place; 0 without a place."""
        return float(self.accepted[version].sum() / max(1, self.places.sum()))


@dataclass(frozen=True, slots=True)
class AcceptanceGain:
    """How much larger one version's acceptance is than another's, with its 95 % interval."""

    mean: float
    low: float
    high: float
    sessions: int


@dataclass(frozen=True, slots=True)
class LessonVerdict:
    """The version that serves from now on, and why."""

    version: int
    reason: Reason
    difference: AcceptanceGain


def difference(score: Score, ours: int, theirs: int) -> AcceptanceGain:
    """Acceptance of `ours` minus that of `theirs`, over all tenants."""
    return _difference(score, ours, theirs, np.arange(len(score.places)), LEAST_SESSIONS)


def _harms_a_tenant(score: Score, ours: int, theirs: int) -> bool:
    """Whether `ours` is surely worse for some tenant.

    The intervals of all tenants hold together with 95 % (Bonferroni): of many tenants one loses by chance.
    """
    passages: dict[str, list[int]] = defaultdict(list)
    for at, tenant in enumerate(score.tenants):
        passages[tenant].append(at)
    tests = len(passages)
    found = (
        _difference(score, ours, theirs, np.array(own), LEAST_OF_TENANT, tests) for own in passages.values()
    )
    return any(gain.high < 0 for gain in found)


def _difference(
    score: Score, ours: int, theirs: int, chosen: NDArray[np.intp], least: int, tests: int = 1
) -> AcceptanceGain:
    gained = (score.accepted[ours] - score.accepted[theirs])[chosen]
    numbers, where = np.unique(score.sessions[chosen], return_inverse=True)
    count = len(numbers)
    if not count:
        return AcceptanceGain(0.0, -inf, inf, 0)
    gains = np.bincount(where, weights=gained, minlength=count)
    places = np.bincount(where, weights=score.places[chosen], minlength=count)
    mean = float(gains.sum() / places.sum())
    if count < least:
        return AcceptanceGain(mean, -inf, inf, count)
    spread = sqrt(count / (count - 1) * float(((gains - mean * places) ** 2).sum())) / float(places.sum())
    half = _student_t(count - 1, 0.025 / tests) * spread
    return AcceptanceGain(mean, mean - half, mean + half, count)


def judge(score: Score, current: int, candidate: int | None, earlier: Sequence[int]) -> LessonVerdict:
    """The version that serves from now on.

    Args:
        current: the version that serves now.
        candidate: the version just made from `current`; None: none was made.
        earlier: versions that served before and can come back.

    Back to an earlier version where the interval of its gain over the current one is above 0, else on to the
    candidate where the same holds for it and no tenant surely loses. All else stays as it is.
    """
    gains = {version: difference(score, version, current) for version in earlier}
    returning = [version for version, gain in gains.items() if gain.low > 0]
    if returning:
        best = max(returning, key=lambda version: gains[version].mean)
        return LessonVerdict(best, "earlier_better", gains[best])
    if candidate is None:
        return LessonVerdict(current, "not_better", AcceptanceGain(0.0, 0.0, 0.0, 0))
    gain = difference(score, candidate, current)
    if gain.low == -inf:
        return LessonVerdict(current, "too_few", gain)
    if gain.low <= 0:
        return LessonVerdict(current, "worse" if gain.high < 0 else "not_better", gain)
    if _harms_a_tenant(score, candidate, current):
        return LessonVerdict(current, "harms_tenant", gain)
    return LessonVerdict(candidate, "better", gain)


def _student_t(degrees: int, tail: float) -> float:
    """The number that Student's t exceeds with chance `tail`, by Fisher's expansion around the normal's."""
    z = NormalDist().inv_cdf(1 - tail)
    return (
        z
        + (z**3 + z) / (4 * degrees)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * degrees**3)
    )
