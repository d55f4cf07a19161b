"""What streams under fire come to: silences around faults, ids twice or never, first differences. Pure."""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from chaos_plan import Fault

AFTER_S = 1.0
"""How long after a process is back a silence still counts as around its fault."""
SHOWN = 20
"""Differences and errors that are told of each at most."""


@dataclass(frozen=True, slots=True)
class Done:
    """A fault that was carried out, and when: from the harm until the process is whole again."""

    fault: Fault
    began_s: float
    ended_s: float


@dataclass(frozen=True, slots=True)
class Switch:
    """A silence at whose end a stream went on under another epoch."""

    silence_s: float
    choice: int
    """Of the first ids after it."""
    epoch: int


@dataclass(slots=True)
class Track:
    """One stream as its client saw it, message by message."""

    name: str
    prompt_length: int
    asked_s: float
    duplicates: int = 0
    """Ids that came at a position which the client had."""
    gaps: int = 0
    """Positions that were passed over."""
    switches: list[Switch] = field(default_factory=list)
    computed_s: dict[tuple[int, int], float] = field(default_factory=dict)
    """By choice and epoch: how long the verifier that went on had the session until its ids were read, behind
    others' as the case may be; of those that could still tell."""
    asked: int = 0
    """How often it was asked for: once, and once more after each orchestrator that was lost."""
    recoveries: int = 0
    """How often its orchestrator moved it to another verifier."""
    completion: Sequence[Sequence[int]] | None = None
    """Ids by choice; None: it did not end."""
    error: str = ""
    times: list[float] = field(default_factory=list)
    _epoch: int = 0
    _moving: bool = False
    _lengths: Counter[int] = field(default_factory=Counter)

    def started(self, epoch: int) -> None:
        """An orchestrator took it, under this epoch."""
        self._moved(epoch)

    def tokens(self, now_s: float, choice: int, position: int, count: int, epoch: int) -> None:
        """So many ids came at this position; `epoch` is 0 where it is as before."""
        due = self.prompt_length + self._lengths[choice]
        self.duplicates += max(0, min(due - position, count))
        self.gaps += max(0, position - due)
        self._lengths[choice] = max(due, position + count) - self.prompt_length
        self._moved(epoch)
        last = self.times[-1] if self.times else self.asked_s
        if self._moving:
            self.switches.append(Switch(now_s - last, choice, self._epoch))
            self._moving = False
        self.times.append(now_s)

    def beyond_prefill(self) -> list[float]:
        """What each switch took beside that, in seconds."""
        known = [it for it in self.switches if (it.choice, it.epoch) in self.computed_s]
        return [max(0.0, it.silence_s - self.computed_s[it.choice, it.epoch]) for it in known]

    def _moved(self, epoch: int) -> None:
        if epoch and self._epoch and epoch != self._epoch and self.times:
            self._moving = True
        self._epoch = epoch or self._epoch

    def silence(self, since_s: float, until_s: float) -> float | None:
        """The longest silence that has a part in this span; None where the stream has none."""
        points = [self.asked_s, *self.times]
        spans = itertools.pairwise(points)
        found = [after - before for before, after in spans if before < until_s and after > since_s]
        return max(found, default=None)


def first_difference(expected: Sequence[int], got: Sequence[int]) -> int | None:
    """Index of the first id that differs or is there once only; None where all are the same."""
    for place, (one, other) in enumerate(zip(expected, got, strict=False)):
        if one != other:
            return place
    return None if len(expected) == len(got) else min(len(expected), len(got))


def difference(track: Track, golden: Sequence[Sequence[int]]) -> dict[str, Any] | None:
    """Where an ended stream parts from its golden output first; None where it does not."""
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


def pauses(tracks: Iterable[Track], done: Iterable[Done]) -> dict[str, dict[str, list[float]]]:
    """For each stream around each fault its longest silence; by role, then harm."""
    tracks = list(tracks)
    found: dict[str, dict[str, list[float]]] = {}
    for one in done:
        of_role = found.setdefault(one.fault.process.role, {})
        silences = of_role.setdefault(one.fault.harm.value, [])
        for track in tracks:
            silence = track.silence(one.began_s, one.ended_s + AFTER_S)
            if silence is not None:
                silences.append(silence)
    return found


def quantiles(values: Sequence[float]) -> dict[str, float | None]:
    """p50 and p99, nearest rank; None where there is nothing."""
    ordered = sorted(values)
    if not ordered:
        return {"p50": None, "p99": None}
    ranks = {"p50": 0.5, "p99": 0.99}
    return {name: round(ordered[math.ceil(share * len(ordered)) - 1], 3) for name, share in ranks.items()}


def summary(
    tracks: Sequence[Track], golden: dict[str, Sequence[Sequence[int]]], done: Sequence[Done]
) -> dict[str, Any]:
    """The fields of the benchmark; `golden` by a stream's name as far as its first slash."""
    ended = [track for track in tracks if track.completion is not None]
    told = [difference(track, golden[track.name.partition("/")[0]]) for track in ended]
    differences = [it for it in told if it is not None]
    by = pauses(tracks, done)
    everything = [silence for of_role in by.values() for silences in of_role.values() for silence in silences]
    switches = [switch.silence_s for track in tracks for switch in track.switches]
    beyond = [rest for track in tracks for rest in track.beyond_prefill()]
    errors = [f"{track.name}: {track.error or 'did not end'}" for track in tracks if track.completion is None]
    return {
        "faults": len(done),
        "streams": len(tracks),
        "identical": len(ended) - len(differences),
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
        "by_fault": {
            role: {
                harm: quantiles(silences)
                | {"faults": sum((it.fault.process.role, it.fault.harm.value) == (role, harm) for it in done)}
                for harm, silences in of_role.items()
            }
            for role, of_role in by.items()
        },
        "differences": differences[:SHOWN],
        "errors": errors[:SHOWN],
    }
