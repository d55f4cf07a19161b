"""The worker's metrics for Prometheus, collected on each scrape, so that they cost a step nothing.

A metric that vLLM has too takes vLLM's name and meaning; the others are the verifier's own.
"""

from collections.abc import Iterator
from functools import partial

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from outrider.lm.kv.blocks import BLOCK
from outrider.lm.runner import PackedLM
from outrider.runtime.metrics import MODEL, PREFIX
from speculative.choice import Fallback
from verifier_service.engine.source_policy import Reputations
from verifier_service.engine.stats import LAST_PLACE, Samples, SourceCounts
from verifier_service.engine.thread import EngineThread
from verifier_service.remote_sources.pool import SourcePool
from verifier_service.sessions.table import SessionTable

OWN = f"{PREFIX}verifier_"

_NODE_OUTCOMES = ("offered", "kept", "stale", "waiting", "duplicate", "refused")
_TOTALS = {
    "steps": "Engine steps, each one forward call of the target.",
    "rows": "Input tokens of all forward calls.",
    "scouts": "Scouts, input tokens that were computed only to learn what the target says there.",
    "rounds": "Passes that committed at least one token of a session, summed over sessions.",
    "committed": "Tokens committed.",
    "waits": "Steps that waited for a draft.",
    "failed_sessions": "Sessions that ended in an error.",
}
_QUANTILES = (0.5, 0.9, 0.99)


class VerifierCollector(Collector):
    """Collects the metrics of engine, links, sessions and KV slots.

    Args:
        engine: counts and times steps.
        sources: links to the sources outside this worker.
        table: of the sessions.
        reputations: which sources outside the worker rest.
        target: the model, with its KV slots, its kind of passes and what they copied from its device.
        model: the target's name in requests, which becomes a label.
    """

    def __init__(
        self,
        engine: EngineThread,
        sources: SourcePool,
        table: SessionTable,
        reputations: Reputations,
        target: PackedLM,
        model: str = "",
    ) -> None:
        self._engine = engine.core
        self._timings = engine.timings
        self._sources = sources
        self._table = table
        self._reputations = reputations
        self._target = target
        self._model = model

    def describe(self) -> Iterator[Metric]:
        """Describes no metric ahead, so that registration reads nothing."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Yields every metric of the verifier."""
        yield from self._requests()
        yield from self._cache()
        yield from self._speculation()
        for name, what in _TOTALS.items():
            yield CounterMetricFamily(OWN + name, what, value=getattr(self._engine.totals, name))
        gauges = {
            "sessions_parked": ("Sessions that are parked until somebody reads them.", self._table.parked),
            "sources_attached": ("Links to sources whose stream is up.", self._sources.attached),
        }
        for name, (what, value) in gauges.items():
            yield GaugeMetricFamily(OWN + name, what, value=value)
        yield from self._source_counts()
        yield from self._choices()
        yield from self._presences()
        yield from self._proposers()
        yield from self._steps()

    def _requests(self) -> Iterator[Metric]:
        waiting = self._engine.sessions.scheduler.waiting
        running = max(0, self._table.running - waiting)
        yield self._gauge("num_requests_running", "Sessions that read their prompt or decode.", running)
        yield self._gauge("num_requests_waiting", "Sessions that wait for memory or for others.", waiting)
        yield self._counter(
            "num_preemptions",
            "Times that a session gave its keys and values up to an older one, to be computed again.",
            self._engine.totals.preempted,
        )
        phases = self._engine.sessions.phases
        for name, what, samples in (
            ("queue", "Time from a session's Open to its first pass.", phases.queue),
            ("prefill", "Time from a session's first pass to the end of its first round.", phases.prefill),
            ("decode", "Time from the end of a session's first round to the session's end.", phases.decode),
        ):
            family = HistogramMetricFamily(f"{PREFIX}request_{name}_time_seconds", what, labels=(MODEL,))
            family.add_metric((self._model,), _seconds(samples), samples.total_ms / 1000)
            yield family

    def _cache(self) -> Iterator[Metric]:
        slots = self._target.pool.max_slots
        yield self._gauge(
            "kv_cache_usage_perc",
            "Share of the KV slots that running sessions hold; 1 is all.",
            self._engine.kv.running_slots / slots,
        )
        info = GaugeMetricFamily(
            f"{PREFIX}cache_config_info",
            "The KV slots of a block and the number of blocks, as labels; the value is 1.",
            labels=(MODEL, "block_size", "num_gpu_blocks"),
        )
        info.add_metric((self._model, str(BLOCK), str(slots // BLOCK)), 1.0)
        yield info
        counts = self._engine.kv.prefixes.counts
        yield self._counter(
            "prefix_cache_queries",
            "Tokens of new sessions, looked up in the cache.",
            counts.asked,
        )
        yield self._counter("prefix_cache_hits", "Tokens of new sessions, found in the cache.", counts.hit)
        yield CounterMetricFamily(
            f"{OWN}prefix_cache_evicted", "Cached blocks that were evicted.", value=counts.evicted_blocks
        )

    def _speculation(self) -> Iterator[Metric]:
        """vLLM's counters of speculation. Accepted tokens per draft, plus 1, is the acceptance length."""
        totals = self._engine.totals
        counter = partial(CounterMetricFamily, labels=(MODEL, "source"))
        yield self._counter(
            "spec_decode_num_drafts", "Rounds that verified at least one node.", totals.drafted_rounds
        )
        drafted = counter(f"{PREFIX}spec_decode_num_draft_tokens", "Nodes that were verified.")
        accepted = counter(f"{PREFIX}spec_decode_num_accepted_tokens", "Nodes committed as tokens.")
        own = counter(
            f"{PREFIX}spec_decode_num_own_tokens",
            "Nodes committed as tokens that no better source had drafted.",
        )
        places = CounterMetricFamily(
            f"{PREFIX}spec_decode_num_accepted_tokens_per_pos",
            "Nodes committed as tokens at this place of the round's path, from 0.",
            labels=(MODEL, "source", "position"),
        )
        for name, counts in sorted(self._engine.counts.copy().items()):
            drafted.add_metric((self._model, name), counts.admitted)
            accepted.add_metric((self._model, name), counts.accepted)
            own.add_metric((self._model, name), counts.own)
            for place, count in enumerate(counts.accepted_at.tolist()):
                more = "+" if place == LAST_PLACE else ""
                places.add_metric((self._model, name, f"{place}{more}"), count)
        yield from (drafted, accepted, own, places)

    def _source_counts(self) -> Iterator[Metric]:
        """What sources did: the sum of what the engine and the links have counted."""
        names = sorted({*self._engine.counts.copy(), *self._sources.counts.copy()})
        nothing = SourceCounts()
        counts = {
            name: self._engine.counts.get(name, nothing).plus(self._sources.counts.get(name, nothing))
            for name in names
        }
        nodes = CounterMetricFamily(
            f"{OWN}source_nodes", "Drafted nodes by what became of them.", labels=("source", "outcome")
        )
        dropped = CounterMetricFamily(
            f"{OWN}source_drafts_dropped", "Drafts dropped whole, by reason.", labels=("source", "reason")
        )
        sessions = CounterMetricFamily(
            f"{OWN}source_sessions_lost",
            "Sessions that a source does not draft for: muted after something malformed, or refused by it.",
            labels=("source", "reason"),
        )
        for name, count in counts.items():
            for outcome in _NODE_OUTCOMES:
                nodes.add_metric((name, outcome), getattr(count, outcome))
            dropped.add_metric((name, "malformed"), count.malformed)
            dropped.add_metric((name, "flooded"), count.flooded)
            sessions.add_metric((name, "muted"), count.muted)
            sessions.add_metric((name, "refused"), count.unfollowed)
        yield from (nodes, dropped, sessions)

    def _choices(self) -> Iterator[Metric]:
        """How tokens were chosen, and how many fell back to whole rows."""
        choices = self._engine.totals.choices
        yield CounterMetricFamily(
            f"{OWN}tokens_chosen",
            "Tokens that the target chose at nodes of draft trees, accepted or not.",
            value=choices.tokens,
        )
        fallbacks = CounterMetricFamily(
            f"{OWN}choice_fallbacks",
            "Tokens chosen from a whole row of logits, because the row's digest did not suffice.",
            labels=("reason",),
        )
        for reason in Fallback:
            fallbacks.add_metric((reason.value,), choices.fallbacks[reason])
        yield fallbacks
        transfers = self._target.transfers
        yield CounterMetricFamily(
            f"{OWN}rows_fetched",
            "Rows of logits that were copied from the device because their digests did not suffice.",
            value=transfers.fetched_rows,
        )
        down = CounterMetricFamily(
            f"{OWN}bytes_down",
            "Bytes that passes copied from the device: planned, or of fetched rows.",
            labels=("kind",),
        )
        down.add_metric(("planned",), transfers.planned_bytes)
        down.add_metric(("fetched",), transfers.fetched_bytes)
        yield down

    def _presences(self) -> Iterator[Metric]:
        """What remote sources cost the target, measured on steps of one session, and which of them rest."""
        loss = GaugeMetricFamily(
            f"{OWN}source_slowdown",
            "Part of its speed that a step of one session loses while sessions follow the source.",
            labels=("source",),
        )
        paused = GaugeMetricFamily(
            f"{OWN}sources_paused",
            "1 while all sessions leave the source alone to measure what it costs.",
            labels=("source",),
        )
        resting = GaugeMetricFamily(
            f"{OWN}sources_resting",
            "1 while sessions leave a source outside the verifier alone, as it gains too little.",
            labels=("source", "sampling"),
        )
        # A source that was forgotten and met again may be there twice for a while.
        # Nor is a name unique: some requests may use a part of the names that an address has.
        known = {name: presence for presence in self._engine.presences.known for name in presence.names}
        for name, presence in known.items():
            loss.add_metric((name,), presence.measured(1) or 0.0)
            paused.add_metric((name,), float(presence.paused))
            for sampling, rests in self._reputations.resting(name).items():
                resting.add_metric((name, sampling), float(rests))
        yield from (loss, paused, resting)

    def _proposers(self) -> Iterator[Metric]:
        """Metrics of batched proposers: their time, and which proposers are muted or rest."""
        hosted = self._engine.proposers
        muted = GaugeMetricFamily(
            f"{OWN}proposers_muted",
            "1 for a batched proposer that failed or was slow, and is no longer called.",
            labels=("source",),
        )
        resting = GaugeMetricFamily(
            f"{OWN}proposers_resting",
            "1 for a batched proposer that steps leave out for now, as its drafts are not worth its time.",
            labels=("source", "sampling"),
        )
        seconds = CounterMetricFamily(
            f"{OWN}proposer_seconds",
            "Time that the engine's thread spent in calls to a batched proposer.",
            labels=("source",),
        )
        for name in hosted.names:
            muted.add_metric((name,), float(name in hosted.muted))
            for sampling, rests in hosted.resting(name).items():
                resting.add_metric((name, sampling), float(rests))
            seconds.add_metric((name,), hosted.spent_s(name))
        yield from (muted, resting, seconds)
        yield CounterMetricFamily(f"{OWN}swaps", "Swaps of a head's weights.", value=hosted.swaps)
        yield CounterMetricFamily(
            f"{OWN}swap_seconds", "Time for which swaps held passes up.", value=hosted.swapping_s
        )

    def _steps(self) -> Iterator[Metric]:
        info = GaugeMetricFamily(
            f"{OWN}passes_info",
            "How the target's passes run, as labels; the value is 1.",
            labels=("numerics", "passes"),
        )
        info.add_metric((self._target.numerics, self._target.passes), 1.0)
        yield info
        timings = self._timings
        parts = {
            "forward": timings.forward,
            "sampling": timings.sampling,
            "proposing": timings.proposing,
            "waiting": timings.waiting,
        }
        steps = HistogramMetricFamily(f"{OWN}step_seconds", "Time of a step's phases.", labels=("phase",))
        for part, samples in parts.items():
            steps.add_metric((part,), _seconds(samples), samples.total_ms / 1000)
        split = HistogramMetricFamily(
            f"{OWN}step_split_seconds",
            "Time between two forwards, less sampling, proposing and waiting, by sessions in the step.",
            labels=("sessions",),
        )
        exact = GaugeMetricFamily(
            f"{OWN}split_ms",
            "Quantiles of that time over the last few thousand steps, in ms.",
            labels=("sessions", "quantile"),
        )
        for sessions, samples in sorted(timings.split.items()):
            split.add_metric((str(sessions),), _seconds(samples), samples.total_ms / 1000)
            for quantile in _QUANTILES:
                if len(samples):
                    exact.add_metric((str(sessions), str(quantile)), samples.quantile(quantile))
        yield from (steps, split, exact)

    def _gauge(self, name: str, what: str, value: float) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, what, labels=(MODEL,))
        family.add_metric((self._model,), value)
        return family

    def _counter(self, name: str, what: str, value: float) -> Metric:
        family = CounterMetricFamily(PREFIX + name, what, labels=(MODEL,))
        family.add_metric((self._model,), value)
        return family


def _seconds(samples: Samples) -> list[tuple[str, float]]:
    """Prometheus's cumulative counts, by upper bound in seconds."""
    counted = samples.buckets.copy()
    bounds = (*(f"{bound / 1000:g}" for bound in samples.bounds), "+Inf")
    return [(bound, float(sum(counted[: at + 1]))) for at, bound in enumerate(bounds)]
