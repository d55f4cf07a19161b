"""The engine's counts as Prometheus sees them: read when asked for, so that counting costs a pass nothing."""

from collections.abc import Callable, Iterator
from dataclasses import asdict

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from drafter_service.engine import Counts, Engine

PREFIX = "outrider_drafter_"

WHAT = {
    "passes": "Forward passes of the model.",
    "rows": "Input tokens of those passes.",
    "nodes_drafted": "Nodes sent to verifiers, or dropped on the way out.",
    "reroots": "Commits that moved a draft tree's root.",
    "nodes_committed": "Drafted nodes that the target committed.",
    "nodes_kept": "Nodes still possible after a commit, summed over commits.",
    "nodes_dropped": "Nodes off the committed path.",
    "refusals": "Sessions that were not followed, or no longer.",
    "unknown_aliases": "Progress and ends under an alias that is not followed.",
    "failed_passes": "Passes that failed; their sessions were refused.",
    "failed_sessions": "Sessions that failed by themselves, and were refused.",
}


class EngineCollector(Collector):
    """Everything the engine and its roster can tell. The engine is None until the model is loaded."""

    def __init__(self, engine: Callable[[], Engine | None]) -> None:
        self._engine = engine

    def describe(self) -> Iterator[Metric]:
        """Nothing is asked of the engine at registration."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Each metric once."""
        engine = self._engine()
        counts = Counts() if engine is None else engine.counts
        for name, value in asdict(counts).items():
            yield CounterMetricFamily(PREFIX + name, WHAT[name], value=value)
        gauges = {
            "sessions": ("Sessions followed now.", 0 if engine is None else len(engine.roster)),
            "ids_waiting": ("Committed ids that have yet to be read.", _waiting(engine)),
            "sessions_kept": ("Sessions whose stream broke and whose cache is kept.", _kept(engine)),
            "kv_slots": ("Tokens that caches have room for.", _slots(engine)),
        }
        for name, (what, value) in gauges.items():
            yield GaugeMetricFamily(PREFIX + name, what, value=value)


def _waiting(engine: Engine | None) -> int:
    return 0 if engine is None else engine.roster.unread


def _kept(engine: Engine | None) -> int:
    return 0 if engine is None else engine.roster.kept


def _slots(engine: Engine | None) -> int:
    return 0 if engine is None else engine.drafter.cached_tokens
