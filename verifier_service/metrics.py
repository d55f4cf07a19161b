"""The worker's counts as Prometheus sees them: read when asked for, so that counting costs a step nothing."""

from collections.abc import Iterator

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from outrider.lm.pool import SlotPool
from verifier_service.counts import SourceCounts
from verifier_service.engine import Engine
from verifier_service.registry import Registry
from verifier_service.sources.links import Links
from verifier_service.timings import BUCKETS_MS, Samples, Timings

PREFIX = "outrider_verifier_"

_NODE_OUTCOMES = ("offered", "kept", "stale", "waiting", "duplicate", "refused", "admitted", "accepted")
_TOTALS = {
    "steps": "Engine steps, each one forward call of the target.",
    "rows": "Input tokens of those calls.",
    "rounds": "Passes that committed at least one token of a session, summed over sessions.",
    "committed": "Tokens committed.",
    "preempted": "Sessions that gave up their keys and values to older ones, to be computed again.",
    "waits": "Steps that waited for a draft.",
    "failed_sessions": "Sessions that ended in an error.",
}
_QUANTILES = (0.5, 0.9, 0.99)


class VerifierCollector(Collector):
    """Everything that engine, links, sessions and slots can tell."""

    def __init__(self, engine: Engine, links: Links, registry: Registry, pool: SlotPool) -> None:
        self._engine = engine
        self._links = links
        self._registry = registry
        self._pool = pool

    def describe(self) -> Iterator[Metric]:
        """Nothing is read at registration."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Each metric once."""
        for name, what in _TOTALS.items():
            yield CounterMetricFamily(PREFIX + name, what, value=getattr(self._engine.totals, name))
        for name, (what, value) in self._prefixes().items():
            yield CounterMetricFamily(PREFIX + name, what, value=value)
        gauges = {
            "sessions": ("Sessions running now.", self._registry.running),
            "sessions_waiting": ("Those of them that wait for memory or for others.", self._engine.waiting),
            "sessions_parked": ("Sessions that nobody reads, kept to go on.", self._registry.parked),
            "sources_attached": ("Links to sources whose stream is up.", self._links.attached),
            "kv_slots_used": (
                "Tokens that sessions and what is cached take.",
                self._pool.used_slots,
            ),
            "kv_slots": ("Tokens that there may be room for in all.", self._pool.max_slots),
        }
        for name, (what, value) in gauges.items():
            yield GaugeMetricFamily(PREFIX + name, what, value=value)
        yield from self._sources()
        yield from _times(self._engine.timings)

    def _prefixes(self) -> dict[str, tuple[str, int]]:
        counts = self._engine.prefixes
        return {
            "prefix_cache_queries": (
                "Ids of sessions that began, looked up in the cache.",
                counts.asked,
            ),
            "prefix_cache_hits": ("Those of them that were found.", counts.hit),
            "prefix_cache_evicted": ("Cached blocks that were evicted.", counts.evicted_blocks),
        }

    def _sources(self) -> Iterator[Metric]:
        """What sources did; the engine and the links each know a part."""
        names = sorted({*self._engine.counts, *self._links.counts})
        nothing = SourceCounts()
        counts = {
            name: self._engine.counts.get(name, nothing).plus(self._links.counts.get(name, nothing))
            for name in names
        }
        nodes = CounterMetricFamily(
            PREFIX + "source_nodes", "Drafted nodes by what became of them.", labels=("source", "outcome")
        )
        dropped = CounterMetricFamily(
            PREFIX + "source_drafts_dropped", "Drafts dropped whole, by why.", labels=("source", "why")
        )
        sessions = CounterMetricFamily(
            PREFIX + "source_sessions_lost",
            "Sessions that a source does not draft for: muted after something malformed, or refused by it.",
            labels=("source", "why"),
        )
        for name, count in counts.items():
            for outcome in _NODE_OUTCOMES:
                nodes.add_metric((name, outcome), getattr(count, outcome))
            dropped.add_metric((name, "malformed"), count.malformed)
            dropped.add_metric((name, "flooded"), count.flooded)
            sessions.add_metric((name, "muted"), count.muted)
            sessions.add_metric((name, "refused"), count.unfollowed)
        yield from (nodes, dropped, sessions)


def _times(timings: Timings) -> Iterator[Metric]:
    parts = {"forward": timings.forward, "sampling": timings.sampling, "waiting": timings.waiting}
    steps = HistogramMetricFamily(PREFIX + "step_ms", "Milliseconds of a step's parts.", labels=("part",))
    for part, samples in parts.items():
        steps.add_metric((part,), _buckets(samples), samples.total_ms)
    split = HistogramMetricFamily(
        PREFIX + "step_split_ms",
        "Milliseconds between two forwards, less sampling and waiting, by sessions in the step.",
        labels=("sessions",),
    )
    exact = GaugeMetricFamily(
        PREFIX + "split_ms", "The same over the last few thousand steps.", labels=("sessions", "quantile")
    )
    for sessions, samples in sorted(timings.split.items()):
        split.add_metric((str(sessions),), _buckets(samples), samples.total_ms)
        for quantile in _QUANTILES:
            if len(samples):
                exact.add_metric((str(sessions), str(quantile)), samples.quantile(quantile))
    yield from (steps, split, exact)


def _buckets(samples: Samples) -> list[tuple[str, float]]:
    """Cumulative counts by upper bound, as Prometheus wants them."""
    counted = samples.buckets.copy()
    bounds = (*(str(bound) for bound in BUCKETS_MS), "+Inf")
    return [(bound, float(sum(counted[: at + 1]))) for at, bound in enumerate(bounds)]
