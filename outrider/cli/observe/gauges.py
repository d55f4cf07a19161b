"""What the /metrics of one process says of it, as a few figures: pure, from two readings some time apart."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

COMMON = "outrider_"


@dataclass(frozen=True, slots=True)
class Sample:
    """One value and what distinguishes it."""

    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Reading:
    """All of a process's samples at one moment."""

    at_s: float
    """On any monotonic clock."""
    samples: Mapping[str, tuple[Sample, ...]] = field(default_factory=dict)

    @property
    def role(self) -> str:
        """What the process says that it is; empty where it is none of ours."""
        return next((sample.labels["role"] for sample in self.of("info")), "")

    def of(self, name: str) -> tuple[Sample, ...]:
        """Samples of a metric, its name without the beginning that all have."""
        return self.samples.get(COMMON + name, ())

    def sum(self, name: str, **labels: str) -> float:
        """Of the samples that have these labels."""
        return sum(one.value for one in self.of(name) if labels.items() <= one.labels.items())

    def by(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """Sums by the value of a label."""
        found: dict[str, float] = defaultdict(float)
        for one in self.of(name):
            if labels.items() <= one.labels.items():
                found[one.labels.get(label, "")] += one.value
        return dict(found)


def read(text: str, at_s: float) -> Reading:
    """Of Prometheus' text format. Raises ValueError where it is none."""
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
        """Between them; above 0."""
        return max(self.after.at_s - self.before.at_s, 1e-9)

    def grown(self, name: str, **labels: str) -> float:
        """By how much a counter grew; from 0 where the process was started anew."""
        before, after = self.before.sum(name, **labels), self.after.sum(name, **labels)
        return after - before if after >= before else after

    def rate(self, name: str, **labels: str) -> float:
        """A second."""
        return self.grown(name, **labels) / self.seconds

    def mean(self, name: str, **labels: str) -> float | None:
        """Of what a histogram observed meanwhile; None where that is nothing."""
        count = self.grown(f"{name}_count", **labels)
        return self.grown(f"{name}_sum", **labels) / count if count else None


def figures(span: ReadingPair) -> dict[str, Any]:
    """What there is to say of a process; counts are of now, rates of the time between the readings."""
    role = span.after.role
    tell = _TELLERS.get(role)
    if tell is None:
        raise ValueError("these are no metrics of ours: there is no outrider_info")
    return {"role": role, **_rounded(tell(span))}


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
    """Nodes verified and accepted meanwhile, by source."""
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


_TELLERS: Mapping[str, Callable[[ReadingPair], dict[str, Any]]] = {
    "orchestrator": _orchestrator,
    "verifier": _verifier,
    "drafter": _drafter,
    "retrieval": _retrieval,
}


def _rounded(value: Any) -> Any:
    """Whole numbers as such, others to six digits."""
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, float):
        return int(value) if value.is_integer() else float(f"{value:.6g}")
    return value
