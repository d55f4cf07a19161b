"""Figures of one class of hostile inputs, from the canary's messages and the loops' stalls. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple


class Message(NamedTuple):
    """One line of the canary that tells of a message."""

    front: str
    kind: str
    """`first`, `gap` or `wrong`."""
    at: float
    """Time of CLOCK_MONOTONIC in seconds."""
    seconds: float
    """The wait for the message; 0 for `wrong`."""
    what: str = ""
    """What was wrong."""

    @classmethod
    def of_line(cls, line: Sequence[Any]) -> "Message":
        """The message that a line of the canary tells of."""
        front, kind, at, last = line
        return cls(front, kind, at, 0.0, last) if kind == "wrong" else cls(front, kind, at, last)


@dataclass(frozen=True, slots=True)
class Window:
    """A span of time, in seconds of CLOCK_MONOTONIC and in seconds since 1970."""

    began: float
    ended: float
    wall_began: float
    wall_ended: float


def longest_waits(
    messages: Iterable[Message], began: float, ended: float, *, whole: bool
) -> dict[str, float]:
    """The longest wait of each front and kind between two times, in seconds.

    Args:
        whole: whether only waits count that begin and end in between; else waits that lie there in part.
    """
    longest: dict[str, float] = {}
    for message in messages:
        first, last = message.at - message.seconds, message.at
        within = began <= first and last <= ended if whole else last > began and first <= ended
        if within and message.kind != "wrong":
            name = f"{message.front} {message.kind}"
            longest[name] = max(longest.get(name, 0.0), message.seconds)
    return longest


def beyond_usual(attacked: dict[str, float], quiet: dict[str, float]) -> dict[str, Any]:
    """By how many ms the canary waited longer than in a quiet time, at most, and where; 0 for nowhere.

    A kind of wait that the quiet time has no example of is compared with the longest wait of any kind then.
    """
    longest = max(quiet.values(), default=0.0)
    beyond = {name: waited - quiet.get(name, longest) for name, waited in attacked.items()}
    where = max(beyond, key=lambda name: beyond[name], default="")
    if not where or beyond[where] <= 0:
        return {"longest_gap_ms": 0.0, "waited_for": ""}
    return {"longest_gap_ms": round(1000 * beyond[where], 1), "waited_for": where}


def longest_stall(stalls: Iterable[dict[str, Any]], window: Window) -> dict[str, Any]:
    """The longest stall that lies in part in a window, and the stall with most processor time."""
    within = [
        stall
        for stall in stalls
        if stall["ended"] >= window.wall_began and stall["ended"] - stall["seconds"] <= window.wall_ended
    ]
    if not within:
        return {"longest_stall_ms": 0.0, "processor_ms": 0.0, "role": "", "where": ""}
    busiest = max(within, key=lambda stall: float(stall["processor_seconds"]))
    return {
        "longest_stall_ms": round(1000 * max(stall["seconds"] for stall in within), 1),
        "processor_ms": round(1000 * busiest["processor_seconds"], 1),
        "role": busiest["role"],
        "where": busiest["where"],
    }


def summed_up(repeats: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One class's figures from its repeats.

    A gap is the median of the repeats, with the longest of them as `worst_gap_ms`. Stalls are the smallest of
    the repeats: what an input does, it does every time; what the machine does, it does now and then. Counts
    are sums, and lasting growth of memory is that of the last repeat.
    """
    stalled = min(repeats, key=lambda one: float(one["processor_ms"]))
    gaps = [float(one["longest_gap_ms"]) for one in repeats]
    statuses: dict[str, int] = {}
    for one in repeats:
        for status, count in one["statuses"].items():
            statuses[status] = statuses.get(status, 0) + count
    return stalled | {
        "longest_gap_ms": round(median(gaps), 1),
        "worst_gap_ms": max(gaps),
        "waited_for": max(repeats, key=lambda one: float(one["longest_gap_ms"]))["waited_for"],
        "usual_gap_ms": round(median(one["usual_gap_ms"] for one in repeats), 1),
        "longest_stall_ms": min(one["longest_stall_ms"] for one in repeats),
        "leaked_bytes": repeats[-1]["leaked_bytes"],
        "statuses": dict(sorted(statuses.items())),
        **{name: sum(one[name] for one in repeats) for name in ("inputs", "wrong", "hung", "tracebacks")},
        "faults": sorted({fault for one in repeats for fault in one["faults"]})[:20],
        "seconds": round(sum(one["seconds"] for one in repeats), 1),
    }
