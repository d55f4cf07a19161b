"""X23: does the budget keep a gain from turning into a loss as streams are added? With heads in the verifier.

Time is processor time of the engine's thread; the three engines take turns on every batch.
"""

from collections.abc import Sequence
from typing import Any

from benchmarks.experiments.experiment import Experiment, Judged, Rows, line, where
from benchmarks.experiments.methods import NODES
from benchmarks.experiments.pair import ModelPair, Scale
from benchmarks.plots.curves import Panel
from benchmarks.proposers.metered_engine import MeteredEngine
from benchmarks.proposers.method_figures import MODES, PLAIN, MethodRuns
from benchmarks.shared.envelope import MODELS
from benchmarks.shared.resumable import Key
from verifier_service.settings import VerifierSettings

STREAMS = {False: (1, 4, 8), True: (1, 2, 4, 8, 16, 24)}
SOURCES = ("lookup", "eagle")
FIXED, ADAPTIVE = "fixed", "adaptive"
REPEATS = 2


def keys(scale: Scale) -> list[Key]:
    """An arm for each number of streams."""
    return [(streams,) for streams in STREAMS[scale.is_full] if streams <= scale.prompts]


def engine_of(pair: ModelPair, budget: str, sources: tuple[str, ...]) -> MeteredEngine:
    """An engine with lookup and EAGLE's head, or without sources."""
    settings = VerifierSettings(
        model=str(pair.target_path),
        heads=(f"eagle={MODELS / 'heads' / 'eagle'}",) if sources else (),
        budget=budget,
        threads=1,
        kv_mb=256,
        cache_dir=None,
    )
    return MeteredEngine(settings, sources, NODES)


def measure(pair: ModelPair, key: Key) -> dict[str, Any]:
    """Tokens per second of processor time by engine, for a number of streams at a time, in both modes."""
    streams = int(key[0])
    engines = {
        PLAIN: engine_of(pair, ADAPTIVE, ()),
        FIXED: engine_of(pair, FIXED, SOURCES),
        ADAPTIVE: engine_of(pair, ADAPTIVE, SOURCES),
    }
    prompts = list(pair.prompts)[: max(streams, 8 // streams * streams)]
    row: dict[str, Any] = {"streams": streams}
    for mode in MODES:
        runs = MethodRuns(engines, prompts, pair.scale.tokens, mode, streams)
        for number in range(REPEATS):
            runs.repeat(number)
        found = runs.fields()
        rate = {arm: each["tokens_per_second"] for arm, each in found.items()}
        row[mode] = {
            "identical": all(each["identical"] for each in found.values()),
            "acceptance_length": {arm: each["acceptance_length"] for arm, each in found.items()},
            "fixed_over_plain": round(rate[FIXED] / rate[PLAIN], 3),
            "adaptive_over_plain": round(rate[ADAPTIVE] / rate[PLAIN], 3),
            "adaptive_over_better": round(rate[ADAPTIVE] / max(rate[PLAIN], rate[FIXED]), 3),
        }
    return row


def judge(rows: Rows) -> Sequence[Judged]:
    """Holds the predictions against the rows."""
    better = [row[mode]["adaptive_over_better"] for row in rows for mode in MODES]
    sampled = [row["sampled"]["fixed_over_plain"] for row in rows]
    same = all(row[mode]["identical"] for row in rows for mode in MODES)
    return (
        Judged(f"{min(better):.2f} to {max(better):.2f}", min(better) >= 0.94),
        Judged(
            f"{sampled[0]:.2f} of plain decoding with {rows[0]['streams']} stream, "
            f"{sampled[-1]:.2f} with {rows[-1]['streams']}",
            sampled[-1] < min(1.0, sampled[0]),
        ),
        Judged("every arm decoded plain decoding's ids" if same else "an arm decoded other ids", same),
    )


def panels(rows: Rows) -> Sequence[Panel]:
    """Speed over plain decoding, by streams."""
    points = [
        {
            "mode": mode,
            "streams": row["streams"],
            FIXED: row[mode]["fixed_over_plain"],
            ADAPTIVE: row[mode]["adaptive_over_plain"],
        }
        for row in rows
        for mode in MODES
    ]
    return [
        Panel(
            mode,
            "streams",
            "speed over plain",
            tuple(line(arm, where(points, mode=mode), "streams", arm) for arm in (FIXED, ADAPTIVE)),
            is_log_x=True,
        )
        for mode in MODES
    ]


X23 = Experiment(
    name="X23",
    question="Does the budget keep the gain from turning into a loss as streams are added?",
    predictions=(
        "the adaptive budget has .94 of the better of plain decoding and all 16 nodes, or more, at any "
        "number of streams",
        "verifying all 16 nodes of every stream is slower than plain decoding for the most sampled streams",
        "no arm changes a token",
    ),
    refuted_by="an adaptive budget below .9 of plain decoding: speculation would have to be switched by hand",
    keys=keys,
    measure=measure,
    judge=judge,
    panels=panels,
)
