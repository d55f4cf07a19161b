"""X21: what does each source add to the others? All together, then one left out, in the verifier's engine."""

from collections.abc import Sequence
from typing import Any

from benchmarks.experiments.experiment import Experiment, Judged, Rows, only
from benchmarks.experiments.methods import HEADS, NODES, SMALL
from benchmarks.experiments.pair import ModelPair, Scale
from benchmarks.plots.curves import Curve, Panel
from benchmarks.proposers.metered_engine import MeteredEngine
from benchmarks.proposers.method_figures import MODES
from benchmarks.shared.envelope import MODELS
from benchmarks.shared.resumable import Key
from verifier_service.proposers import BATCHED_PROPOSERS
from verifier_service.settings import VerifierSettings

SOURCES = ("lookup", "bigram", "eagle", SMALL)
ALL, WITHOUT, ALONE = "all", "without", "alone"


def keys(scale: Scale) -> list[Key]:
    """All sources, all but one, and one alone."""
    return [(ALL, ""), *((kind, source) for kind in (WITHOUT, ALONE) for source in SOURCES)]


def chosen(kind: str, source: str) -> tuple[str, ...]:
    """The sources of an arm."""
    if kind == ALONE:
        return (source,)
    return tuple(each for each in SOURCES if each != source)


def measure(pair: ModelPair, key: Key) -> dict[str, Any]:
    """Tokens a round of an arm in both modes, and who proposed what was accepted."""
    kind, source = str(key[0]), str(key[1])
    names = chosen(kind, source)
    settings = VerifierSettings(
        model=str(pair.target_path),
        proposers=tuple(each for each in names if each in BATCHED_PROPOSERS),
        heads=tuple(f"{each}={MODELS / 'heads' / each}" for each in names if each in HEADS),
        small_model=str(pair.drafter_path) if SMALL in names else "",
        budget="fixed",
        threads=1,
        kv_mb=256,
        cache_dir=None,
    )
    engine = MeteredEngine(settings, names, NODES)
    row: dict[str, Any] = {"kind": kind, "source": source}
    for mode, params in MODES.items():
        done = [
            engine.decode([prompt], pair.scale.tokens, params, seed)
            for seed, prompt in enumerate(pair.prompts)
        ]
        rounds = sum(each.counts.rounds for each in done)
        tokens = sum(len(each.counted) for each in done)
        row[mode] = {
            "identical": pair.are_plain(params.temperature, [each.ids[0] for each in done]),
            "acceptance_length": round(tokens / rounds, 3),
            "nodes_per_round": round(sum(each.counts.nodes for each in done) / rounds, 2),
            "accepted_share": {
                name: round(sum(each.counts.accepted.get(name, 0) for each in done) / tokens, 3)
                for name in names
            },
        }
    return row


def lengths(rows: Rows, mode: str, kind: str) -> dict[str, float]:
    """Tokens a round of each arm of a kind, by source."""
    return {row["source"]: row[mode]["acceptance_length"] for row in rows if row["kind"] == kind}


def judge(rows: Rows) -> Sequence[Judged]:
    """Holds the predictions against the rows."""
    over, added = {}, {}
    for mode in MODES:
        every = only(rows, kind=ALL)[mode]["acceptance_length"]
        over[mode] = every / max(lengths(rows, mode, ALONE).values())
        without = lengths(rows, mode, WITHOUT)
        added[mode] = {source: every - without[source] for source in SOURCES}
    same = all(row[mode]["identical"] for row in rows for mode in MODES)
    greedy = added["greedy"]
    alone = lengths(rows, "greedy", ALONE)
    lost = {source: alone[source] - 1 - greedy[source] for source in (*HEADS[:1], "lookup")}
    return (
        Judged(", ".join(f"{each:.3f} {mode}" for mode, each in over.items()), min(over.values()) >= 0.97),
        Judged(
            ", ".join(f"{source} {each:+.2f}" for source, each in greedy.items()),
            max(greedy, key=lambda source: greedy[source]) == SMALL,
        ),
        Judged(
            ", ".join(f"{source} {each:.2f} less" for source, each in lost.items()),
            all(each > 0 for each in lost.values()),
        ),
        Judged("every arm decoded plain decoding's ids" if same else "an arm decoded other ids", same),
    )


def panels(rows: Rows) -> Sequence[Panel]:
    """What a source brings alone, and what it adds to all others."""
    found = []
    for mode in MODES:
        every = only(rows, kind=ALL)[mode]["acceptance_length"]
        alone, without = (lengths(rows, mode, kind) for kind in (ALONE, WITHOUT))
        found.append(
            Panel(
                f"{mode}: all together {every:.2f} tokens a round",
                "",
                "accepted tokens a round",
                (
                    Curve("alone", SOURCES, tuple(round(alone[each] - 1, 3) for each in SOURCES)),
                    Curve(
                        "added to the others",
                        SOURCES,
                        tuple(round(every - without[each], 3) for each in SOURCES),
                    ),
                ),
            )
        )
    return found


X21 = Experiment(
    name="X21",
    question="What does each source add to the others?",
    predictions=(
        "all together accept as much as the best alone, within 3 %",
        "the small model adds most",
        "EAGLE and lookup add less to the others than they bring alone",
        "no arm changes a token",
    ),
    refuted_by="sources together that are over 3 % worse than the best alone: merging would then cost drafts",
    keys=keys,
    measure=measure,
    judge=judge,
    panels=panels,
)
