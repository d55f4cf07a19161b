"""Figures of drafting methods, from runs of engines, one per method, that take turns."""

from collections.abc import Mapping, Sequence
from itertools import islice, zip_longest
from typing import Any

from benchmarks.proposers.metered_engine import DecodedStreams, MeteredEngine
from benchmarks.proposers.timed_proposer import LevelTimes
from benchmarks.shared.figures import TimedRun, alternating_orders, paired_ratio, same_ids, tokens_per_second
from speculative.params import SamplingParams

PLAIN, ALL = "plain", "all"
MODES = {"greedy": SamplingParams(temperature=0.0), "sampled": SamplingParams(temperature=0.8)}

Run = tuple[TimedRun, DecodedStreams]


class MethodRuns:
    """Runs of every method on the same prompts, in one mode and with one number of streams.

    Args:
        engines: by method; `PLAIN` is among them.
        streams: number of prompts that are decoded at once.
    """

    def __init__(
        self,
        engines: Mapping[str, MeteredEngine],
        prompts: Sequence[Sequence[int]],
        tokens: int,
        mode: str,
        streams: int,
    ) -> None:
        self._engines = engines
        self._batches = [prompts[at : at + streams] for at in range(0, len(prompts) - streams + 1, streams)]
        self._tokens = tokens
        self._mode = mode
        self._runs: list[Run] = []
        self._streams: list[TimedRun] = []
        """Each stream with all of its tokens."""

    def warm_up(self) -> None:
        """Runs every method on every batch without counting it, so that what does not pay comes to rest."""
        for at, batch in enumerate(self._batches):
            for method in self._engines:
                self._decode(method, at, batch)

    def repeat(self, number: int) -> None:
        """Runs every method on every batch once more, in alternating order (ABBA)."""
        orders = islice(alternating_orders(self._engines), number, None)
        for at, batch in enumerate(self._batches):
            for method in next(orders):
                decoded = self._decode(method, at, batch)
                timed = TimedRun(method, at, number, decoded.counted, decoded.seconds, decoded.counts.rounds)
                self._runs.append((timed, decoded))
                self._streams += [
                    TimedRun(method, at * len(batch) + stream, number, ids, decoded.seconds)
                    for stream, ids in enumerate(decoded.ids)
                ]

    def _decode(self, method: str, at: int, batch: Sequence[Sequence[int]]) -> DecodedStreams:
        return self._engines[method].decode(batch, self._tokens, MODES[self._mode], 1000 * at)

    def fields(self) -> dict[str, Any]:
        """The figures of each method by its name."""
        return {method: self._figures(method) for method in self._engines}

    def all_over_best(self) -> dict[str, Any]:
        """The rate of all methods together over that of the best alone, batch by batch, and which that is."""
        rates = {method: self._rate(method) for method in self._engines if method not in (PLAIN, ALL)}
        best = max(rates, key=lambda method: rates[method])
        return {"best": best, **paired_ratio([timed for timed, _ in self._runs], ALL, best)}

    def _rate(self, method: str) -> float:
        return tokens_per_second([timed for timed, _ in self._runs if timed.arm == method])

    def _figures(self, method: str) -> dict[str, Any]:
        timed = [timed for timed, _ in self._runs]
        decoded = [decoded for run, decoded in self._runs if run.arm == method]
        tokens = sum(len(one.counted) for one in decoded)
        rounds = sum(one.counts.rounds for one in decoded)
        accepted = _summed([one.counts.accepted for one in decoded])
        count = sum(accepted.values())
        found: dict[str, Any] = {
            "identical": same_ids(self._streams, [method, PLAIN]),
            "acceptance_length": round(tokens / rounds, 3),
            "tokens_per_second": self._rate(method),
            "over_plain": paired_ratio(timed, method, PLAIN),
            "draft_ms": round(1000 * sum(one.drafting_s for one in decoded) / rounds, 4),
            "round_ms": round(1000 * sum(one.seconds for one in decoded) / rounds, 4),
            "nodes_per_accepted": round(sum(one.counts.nodes for one in decoded) / count, 3)
            if count
            else None,
            "scouts_per_round": round(sum(one.counts.scouts for one in decoded) / rounds, 3),
            "accepted_share": {name: round(part / tokens, 3) for name, part in sorted(accepted.items())},
            "accepted_by_place": _by_place([one.counts.accepted_at for one in decoded], rounds),
            "levels": _levels([one.counts.levels for one in decoded], rounds),
        }
        return found


def _by_place(counts: Sequence[Sequence[int]], rounds: int) -> list[float]:
    """Share of the rounds that accepted a drafted token at each place, up to the last place with any."""
    shares = [round(sum(places) / rounds, 3) for places in zip_longest(*counts, fillvalue=0)]
    return [share for at, share in enumerate(shares) if any(shares[at:])]


def _levels(times: Sequence[Sequence[LevelTimes]], rounds: int) -> list[dict[str, float]]:
    """By depth: how often a round computed the level, and what a call for it took and drafted."""
    found = []
    for depth in zip_longest(*times, fillvalue=LevelTimes()):
        calls, seconds, nodes = (sum(parts) for parts in zip(*depth, strict=True))
        if calls:
            found.append(
                {
                    "per_round": round(calls / rounds, 3),
                    "ms": round(1000 * seconds / calls, 4),
                    "nodes": round(nodes / calls, 2),
                }
            )
    return found


def _summed(counts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    names = sorted({name for one in counts for name in one})
    return {name: sum(one.get(name, 0) for one in counts) for name in names}
