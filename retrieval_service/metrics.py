"""The engine's counts as Prometheus sees them: read when asked for, so that counting costs no lookup time."""

from collections.abc import Callable, Iterator
from dataclasses import asdict

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from retrieval_service.engine import Counts, Engine
from retrieval_service.state import Held, held

PREFIX = "outrider_retrieval_"
LOOKUP_SECONDS = (0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.25)

WHAT = {
    "lookups": "Lookups in one memory of one session.",
    "matches": "Lookups that found something.",
    "nodes_drafted": "Nodes sent to verifiers, or dropped on the way out.",
    "tokens_learnt": "Ids of output that were kept to draft from.",
    "refusals": "Sessions that were not followed, or no longer.",
    "unknown_aliases": "Progress and ends under an alias that is not followed.",
    "failed_sessions": "Sessions that failed by themselves, and were refused.",
}
HELD = {
    "corpora": "Corpora that are loaded.",
    "corpus_tokens": "Ids in them.",
    "mapped_bytes": "Bytes of them that are mapped.",
    "past_tokens": "Ids of past output that are held.",
    "references": "Documents among the references.",
    "sessions": "Sessions followed now.",
}


class EngineCollector(Collector):
    """Everything the engine and its memories can tell. The engine is None until the indexes are mapped."""

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
        now = Held() if engine is None else held(engine)
        for name, value in asdict(now).items():
            yield GaugeMetricFamily(PREFIX + name, HELD[name], value=value)
