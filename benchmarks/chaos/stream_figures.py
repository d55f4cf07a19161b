"""Figures of streams under faults: silences around faults, tokens sent twice or never, differences. Pure."""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.chaos.fault_plan import INDISPENSABLE, ProcessFault

SETTLE_S = 1.0
"""Seconds after a process is back in which a silence still counts as its fault's."""
MOST_REPORTED = 20
"""Most differences, and most errors, in the result."""


@dataclass(frozen=True, slots=True)
class CompletedFault:
    """A fault that was carried out, and its seconds: from the harm until the process is ready again."""

    fault: ProcessFault
    began_s: float
    ended_s: float


@dataclass(frozen=True, slots=True)
class EpochSwitch:
    """A silence after which a stream went on under another epoch."""

    silence_s: float
    ended_s: float
    """When the silence ended."""
    choice: int
    """The choice of the first tokens after the silence."""
    epoch: int


@dataclass(slots=True)
class StreamRecord:
    """One stream as its client saw it, message by message."""

    name: str
    prompt_length: int
    asked_s: float
    duplicates: int = 0
    """Tokens that came at a position which the client had already."""
    gaps: int = 0
    """Positions that the stream passed over."""
    switches: list[EpochSwitch] = field(default_factory=list)
    computed_s: dict[tuple[int, int], float] = field(default_factory=dict)
    """By choice and epoch: seconds from a verifier's takeover until it had read the session's tokens, its
    wait for other sessions included. Only verifiers that still answered are here."""
    asked: int = 0
    """How often the client asked for the stream: once, and once more after each lost orchestrator."""
    recoveries: int = 0
    """How often the orchestrator moved the stream to another verifier."""
    completion: Sequence[Sequence[int]] | None = None
    """Ids by choice; None where the stream did not end."""
    error: str = ""
    has_slept: bool = False
    """Whether its device slept for a while, so that its silences say nothing of the services."""
    twin_error: str = ""
    """Where a second stream of the same request got other ids; empty where none did."""
    times: list[float] = field(default_factory=list)
    _epoch: int = 0
    _moving: bool = False
    _lengths: Counter[int] = field(default_factory=Counter)

    def record_tokens(self, now_s: float, choice: int, position: int, count: int, epoch: int) -> None:
        """Records `count` tokens at this position; `epoch` is 0 where it has not changed."""
        due = self.prompt_length + self._lengths[choice]
        self.duplicates += max(0, min(due - position, count))
        self.gaps += max(0, position - due)
        self._lengths[choice] = max(due, position + count) - self.prompt_length
        self.record_epoch(epoch)
        last = self.times[-1] if self.times else self.asked_s
        if self._moving:
            self.switches.append(EpochSwitch(now_s - last, now_s, choice, self._epoch))
            self._moving = False
        self.times.append(now_s)

    def beyond_prefill(self, done: Sequence[CompletedFault]) -> tuple[list[float], list[float]]:
        """Seconds of each switch beyond the reading time that is known for it.

        The first list has the switches of which all reading is known, the second those that were interrupted:
        a second verifier or orchestrator was harmed before the last verifier had the session. A verifier
        that was lost while it read the tokens cannot tell how long it had read, so that the rest of such a
        silence holds its reading too.
        """
        harms = [(it.began_s, it.ended_s) for it in done if it.fault.process.role in INDISPENSABLE]
        whole, interrupted = list[float](), list[float]()
        for each in self.switches:
            read_s = self.computed_s.get((each.choice, each.epoch))
            if read_s is None:
                continue
            rest_s = max(0.0, each.silence_s - read_s)
            began_s = each.ended_s - each.silence_s
            before = sum(began < began_s + rest_s and ended > began_s for began, ended in harms)
            (whole if before <= 1 else interrupted).append(rest_s)
        return whole, interrupted

    def record_epoch(self, epoch: int) -> None:
        """Records the epoch under which the stream runs now; 0 where it has not changed."""
        if epoch and self._epoch and epoch != self._epoch and self.times:
            self._moving = True
        self._epoch = epoch or self._epoch

    def silence(self, since_s: float, until_s: float) -> float | None:
        """Seconds of the longest silence that overlaps this span; None where no silence does."""
        points = [self.asked_s, *self.times]
        spans = itertools.pairwise(points)
        found = [after - before for before, after in spans if before < until_s and after > since_s]
        return max(found, default=None)


def first_difference(expected: Sequence[int], got: Sequence[int]) -> int | None:
    """Index of the first id that differs or is missing on one side; None where all ids are the same."""
    for place, (right, found) in enumerate(zip(expected, got, strict=False)):
        if right != found:
            return place
    return None if len(expected) == len(got) else min(len(expected), len(got))


def difference(track: StreamRecord, golden: Sequence[Sequence[int]]) -> dict[str, Any] | None:
    """Where an ended stream first differs from its golden output; None where it does not differ."""
    assert track.completion is not None
    for choice, (expected, got) in enumerate(zip(golden, track.completion, strict=True)):
        place = first_difference(expected, got)
        if place is not None:
            return {
                "stream": track.name,
                "choice": choice,
                "at": place,
                "expected": list(expected[place : place + 4]),
                "got": list(got[place : place + 4]),
                "recoveries": track.recoveries,
                "asked": track.asked,
            }
    return None


def pauses(
    tracks: Iterable[StreamRecord], done: Iterable[CompletedFault]
) -> dict[str, dict[str, list[float]]]:
    """Each stream's longest silence around each fault, in seconds, by role and then by harm."""
    tracks = list(tracks)
    found: dict[str, dict[str, list[float]]] = {}
    for completed in done:
        of_role = found.setdefault(completed.fault.process.role, {})
        silences = of_role.setdefault(completed.fault.harm.value, [])
        for track in tracks:
            silence = track.silence(completed.began_s, completed.ended_s + SETTLE_S)
            if silence is not None:
                silences.append(silence)
    return found


def quantiles(values: Sequence[float]) -> dict[str, float | None]:
    """p50 and p99 of the values by nearest rank; None of no values."""
    ordered = sorted(values)
    if not ordered:
        return {"p50": None, "p99": None}
    ranks = {"p50": 0.5, "p99": 0.99}
    return {name: round(ordered[math.ceil(share * len(ordered)) - 1], 3) for name, share in ranks.items()}


def summary(
    tracks: Sequence[StreamRecord], golden: dict[str, Sequence[Sequence[int]]], done: Sequence[CompletedFault]
) -> dict[str, Any]:
    """The fields of the benchmark's result.

    Args:
        golden: ids by choice, by a stream's name up to its first slash.
    """
    ended = [track for track in tracks if track.completion is not None]
    found = [difference(track, golden[track.name.partition("/")[0]]) for track in ended]
    differences = [each for each in found if each is not None]
    awake = [track for track in tracks if not track.has_slept]
    by = pauses(awake, done)
    everything = [silence for of_role in by.values() for silences in of_role.values() for silence in silences]
    switches = [switch.silence_s for track in awake for switch in track.switches]
    rests = [track.beyond_prefill(done) for track in awake]
    beyond = [rest for whole, _ in rests for rest in whole]
    interrupted = [rest for _, of_interrupted in rests for rest in of_interrupted]
    errors = [f"{track.name}: {track.error or 'did not end'}" for track in tracks if track.completion is None]
    twins = [f"{track.name}: {track.twin_error}" for track in tracks if track.twin_error]
    return {
        "faults": len(done),
        "streams": len(tracks),
        "identical": len(ended) - len(differences) - len(twins),
        "duplicates": sum(track.duplicates for track in tracks),
        "gaps": sum(track.gaps for track in tracks),
        "failed": len(errors),
        "tokens": sum(len(ids) for track in ended for ids in track.completion or ()),
        "recoveries": {
            "verifier": sum(track.recoveries for track in tracks),
            "orchestrator": sum(max(0, track.asked - 1) for track in tracks),
        },
        "pause_s": quantiles(everything),
        "switch_s": quantiles(switches) | {"count": len(switches)},
        "beyond_prefill_s": quantiles(beyond) | {"count": len(beyond)},
        "interrupted_prefill_s": quantiles(interrupted) | {"count": len(interrupted)},
        "by_fault": {
            role: {
                harm: quantiles(silences)
                | {"faults": sum((it.fault.process.role, it.fault.harm.value) == (role, harm) for it in done)}
                for harm, silences in of_role.items()
            }
            for role, of_role in by.items()
        },
        "differences": differences[:MOST_REPORTED],
        "errors": (errors + twins)[:MOST_REPORTED],
    }
