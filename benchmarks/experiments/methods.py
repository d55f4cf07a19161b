"""X8: small model, heads or lookup? Accepted tokens against the processor time of drafting."""

from collections.abc import Sequence
from typing import Any

from benchmarks.experiments.experiment import Experiment, Judged, Rows
from benchmarks.experiments.pair import ModelPair, Scale
from benchmarks.plots.curves import Curve, Panel
from benchmarks.proposers.metered_engine import MeteredEngine
from benchmarks.proposers.method_figures import MODES, PLAIN
from benchmarks.shared.envelope import MODELS
from benchmarks.shared.resumable import Key
from verifier_service.proposers import BATCHED_PROPOSERS
from verifier_service.settings import VerifierSettings

NODES = 16
SMALL = "small-model"
HEADS = ("eagle", "medusa")
METHODS = ("lookup", *BATCHED_PROPOSERS, *HEADS, SMALL)


def keys(scale: Scale) -> list[Key]:
    """An arm for each method, and one for plain decoding, which the others are held against."""
    return [(method,) for method in (PLAIN, *METHODS)]


def engine_of(pair: ModelPair, method: str) -> MeteredEngine:
    """An engine with one method; every node that it drafts is verified, whether or not that pays."""
    settings = VerifierSettings(
        model=str(pair.target_path),
        proposers=(method,) if method in BATCHED_PROPOSERS else (),
        heads=(f"{method}={MODELS / 'heads' / method}",) if method in HEADS else (),
        small_model=str(pair.drafter_path) if method == SMALL else "",
        budget="fixed",
        threads=1,
        kv_mb=256,
        cache_dir=None,
    )
    return MeteredEngine(settings, () if method == PLAIN else (method,), NODES)


def measure(pair: ModelPair, key: Key) -> dict[str, Any]:
    """Counts and processor time of one method on all prompts, one stream at a time, in both modes."""
    method = str(key[0])
    engine = engine_of(pair, method)
    return {"method": method} | {mode: in_mode(pair, engine, mode) for mode in MODES}


def in_mode(pair: ModelPair, engine: MeteredEngine, mode: str) -> dict[str, Any]:
    """The figures of one method in one mode."""
    params, tokens = MODES[mode], pair.scale.tokens
    done = [engine.decode([prompt], tokens, params, seed) for seed, prompt in enumerate(pair.prompts)]
    rounds = sum(each.counts.rounds for each in done)
    nodes = sum(each.counts.nodes for each in done)
    accepted = sum(sum(each.counts.accepted.values()) for each in done)
    return {
        "identical": pair.are_plain(params.temperature, [each.ids[0] for each in done]),
        "acceptance_length": round(sum(len(each.counted) for each in done) / rounds, 3),
        "draft_ms": round(1000 * sum(each.drafting_s for each in done) / rounds, 4),
        "round_ms": round(1000 * sum(each.seconds for each in done) / rounds, 4),
        "nodes_per_accepted": round(nodes / accepted, 3) if accepted else None,
    }


def judge(rows: Rows) -> Sequence[Judged]:
    """Holds the predictions against the rows."""
    of = {row["method"]: row["greedy"] for row in rows}
    length = {method: of[method]["acceptance_length"] for method in METHODS}
    plain_ms = of[PLAIN]["round_ms"]
    speed = {method: length[method] / of[method]["round_ms"] * plain_ms for method in METHODS}
    best, fastest = (max(METHODS, key=lambda method: by[method]) for by in (length, speed))
    same = all(row[mode]["identical"] for row in rows for mode in MODES)
    return (
        Judged(f"{length['eagle']:.2f}", 2.2 <= length["eagle"] <= 3.0),
        Judged(f"{length['medusa']:.2f}", 1.7 <= length["medusa"] <= 2.2),
        Judged(f"{best} accepts most: {length[best]:.2f} tokens a round", best == SMALL),
        Judged(
            f"{fastest} has {speed[fastest]:.2f} of plain decoding's speed, {SMALL} {speed[SMALL]:.2f}",
            fastest != SMALL,
        ),
        Judged("every method decoded plain decoding's ids" if same else "a method decoded other ids", same),
    )


def panels(rows: Rows) -> Sequence[Panel]:
    """Accepted tokens over processor time of drafting, a point for each method."""
    of = {row["method"]: row for row in rows}
    return [
        Panel(
            f"{mode}, {NODES} nodes",
            "drafting, processor ms a round",
            "accepted tokens a round",
            tuple(
                Curve(
                    method,
                    (of[method][mode]["draft_ms"],),
                    (round(of[method][mode]["acceptance_length"] - 1, 3),),
                )
                for method in METHODS
            ),
            is_scatter=True,
        )
        for mode in MODES
    ]


X8 = Experiment(
    name="X8",
    question="Small model, heads or lookup: which drafts best for its cost?",
    predictions=(
        "EAGLE reaches 2.2 to 3.0 tokens a round",
        "Medusa reaches 1.7 to 2.2",
        "the small model's drafts are accepted most",
        "on the target's own thread a cheaper method is faster than the small model",
        "no method changes a token",
    ),
    refuted_by="a method that is best in drafts and in time: the question would then have one answer",
    keys=keys,
    measure=measure,
    judge=judge,
    panels=panels,
)
