"""Computes a few figures of a process from two readings of its /metrics. Pure."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

COMMON = "outrider_"
"""Prefix of the names of all metrics."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of a metric, with its labels."""

    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Reading:
    """All of a process's samples at one moment."""

    at_s: float
    """Time of the reading, in seconds of a monotonic clock."""
    samples: Mapping[str, tuple[Sample, ...]] = field(default_factory=dict)

    @property
    def role(self) -> str:
        """The process's role by its metrics; empty where it is no process of Outrider."""
        return next((sample.labels["role"] for sample in self.of("info")), "")

    def of(self, name: str) -> tuple[Sample, ...]:
        """Samples of a metric, by its name without the prefix."""
        return self.samples.get(COMMON + name, ())

    def sum(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples with these labels."""
        return sum(one.value for one in self.of(name) if labels.items() <= one.labels.items())

    def by(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """Value of a label to the sum of the metric's samples that have it."""
        found: dict[str, float] = defaultdict(float)
        for one in self.of(name):
            if labels.items() <= one.labels.items():
                found[one.labels.get(label, "")] += one.value
        return dict(found)


def read(text: str, at_s: float) -> Reading:
    """Reads metrics from Prometheus' text format. Raises ValueError for other text."""
    found: dict[str, list[Sample]] = defaultdict(list)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith(COMMON):
                found[sample.name].append(Sample(sample.labels, sample.value))
    return Reading(at_s, {name: tuple(samples) for name, samples in found.items()})


@dataclass(frozen=True, slots=True)
class ReadingPair:
    """Two readings of one process."""

    before: Reading
    after: Reading

    @property
    def seconds(self) -> float:
        """Seconds between the two readings; above 0."""
        return max(self.after.at_s - self.before.at_s, 1e-9)

    def grown(self, name: str, **labels: str) -> float:
        """Growth of a counter between the readings; counted from 0 where the process restarted."""
        before, after = self.before.sum(name, **labels), self.after.sum(name, **labels)
        return after - before if after >= before else after

    def rate(self, name: str, **labels: str) -> float:
        """Growth of a counter per second."""
        return self.grown(name, **labels) / self.seconds

    def mean(self, name: str, **labels: str) -> float | None:
        """Mean of a histogram's observations between the readings; None without any."""
        count = self.grown(f"{name}_count", **labels)
        return self.grown(f"{name}_sum", **labels) / count if count else None


def figures(span: ReadingPair) -> dict[str, Any]:
    """Figures of a process by name: counts of the later reading, rates of the time between the readings."""
    role = span.after.role
    compute = _FIGURES.get(role)
    if compute is None:
        raise ValueError("these are no metrics of ours: there is no outrider_info")
    return {"role": role, **_rounded(compute(span))}


def _orchestrator(span: ReadingPair) -> dict[str, Any]:
    now = span.after
    errors = {
        reason: span.grown("orchestrator_request_errors_total", reason=reason)
        for reason in now.by("orchestrator_request_errors_total", "reason")
    }
    peers = now.by("orchestrator_peer_up", "peer")
    store = "up" if now.sum("orchestrator_store_up") else "away"
    return {
        "requests": now.sum("orchestrator_requests"),
        "requests_per_second": span.rate("request_success_total"),
        "tokens_per_second": span.rate("generation_tokens_total"),
        "first_token_s": span.mean("time_to_first_token_seconds"),
        "inter_token_s": span.mean("inter_token_latency_seconds"),
        "errors": {reason: count for reason, count in errors.items() if count},
        "peers_up": sum(map(bool, peers.values())),
        "peers": len(peers),
        "store": store,
        "store_sessions": now.sum("orchestrator_store_sessions"),
    }


def _verifier(span: ReadingPair) -> dict[str, Any]:
    now = span.after
    committed, rounds = span.grown("verifier_committed_total"), span.grown("verifier_rounds_total")
    return {
        "requests": now.sum("num_requests_running"),
        "waiting": now.sum("num_requests_waiting"),
        "tokens_per_second": committed / span.seconds,
        "acceptance_length": committed / rounds if rounds else None,
        "sources": _sources(span),
        "kv": now.sum("kv_cache_usage_perc"),
        "step_s": span.mean("verifier_step_seconds", phase="forward"),
        "steps_per_second": span.rate("verifier_steps_total"),
        "sources_attached": now.sum("verifier_sources_attached"),
        "failed_sessions": span.grown("verifier_failed_sessions_total"),
    }


def _sources(span: ReadingPair) -> dict[str, dict[str, Any]]:
    """Source to its nodes that were verified and accepted between the readings."""
    found = {}
    for source in sorted(span.after.by("spec_decode_num_draft_tokens_total", "source")):
        verified = span.grown("spec_decode_num_draft_tokens_total", source=source)
        accepted = span.grown("spec_decode_num_accepted_tokens_total", source=source)
        if verified:
            found[source] = {"verified": verified, "accepted": accepted, "share": accepted / verified}
    return found


def _drafter(span: ReadingPair) -> dict[str, Any]:
    now = span.after
    drafted = span.grown("drafter_nodes_drafted_total")
    return {
        "requests": now.sum("drafter_sessions"),
        "waiting_ids": now.sum("drafter_ids_waiting"),
        "nodes_per_second": drafted / span.seconds,
        "committed_share": span.grown("drafter_nodes_committed_total") / drafted if drafted else None,
        "passes_per_second": span.rate("drafter_passes_total"),
        "kv_slots": now.sum("drafter_kv_slots"),
    }


def _retrieval(span: ReadingPair) -> dict[str, Any]:
    now = span.after
    lookups = span.grown("retrieval_lookups_total")
    return {
        "requests": now.sum("retrieval_sessions"),
        "nodes_per_second": span.rate("retrieval_nodes_drafted_total"),
        "lookups_per_second": lookups / span.seconds,
        "found_share": span.grown("retrieval_matches_total") / lookups if lookups else None,
        "lookup_s": span.mean("retrieval_lookup_seconds"),
        "corpora": now.sum("retrieval_corpora"),
        "past_tokens": now.sum("retrieval_past_tokens"),
    }


_FIGURES: Mapping[str, Callable[[ReadingPair], dict[str, Any]]] = {
    "orchestrator": _orchestrator,
    "verifier": _verifier,
    "drafter": _drafter,
    "retrieval": _retrieval,
}


def _rounded(value: Any) -> Any:
    """A value with its floats as whole numbers, or to six digits."""
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, float):
        return int(value) if value.is_integer() else float(f"{value:.6g}")
    return value
