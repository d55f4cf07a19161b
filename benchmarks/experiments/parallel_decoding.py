"""X9: more rows for fewer steps: Jacobi and Lookahead decoding, and the next token from an early exit."""

import math
from collections.abc import Sequence
from typing import Any

from benchmarks.experiments.chains import pass_cost
from benchmarks.experiments.experiment import Experiment, Judged, Rows, line, only, where
from benchmarks.experiments.pair import ModelPair, Scale
from benchmarks.plots.curves import Panel
from benchmarks.proposers.metered_engine import MeteredEngine
from benchmarks.shared.resumable import Key
from outrider.lm.continuations import Continuations
from outrider.lm.load.model import load_model
from outrider.skip_set import whole_layers
from speculative.params import SamplingParams
from verifier_service.proposers.batched import BatchedProposer
from verifier_service.proposers.jacobi import JacobiProposer
from verifier_service.proposers.lookahead import LookaheadProposer
from verifier_service.settings import VerifierSettings

_FEW = ((5, 3), (10, 3), (15, 5))
WINDOWS = {False: _FEW, True: (*_FEW, (3, 3), (7, 3), (15, 3), (10, 5))}
"""Windows of Lookahead as width and n-gram, by whether the experiment is run in full."""
NODE_LIMIT = 128
JACOBI, LOOKAHEAD = "jacobi", "lookahead"


def keys(scale: Scale) -> list[Key]:
    """Arms of each method greedy and sampled, and the exits."""
    windows: list[Key] = [
        (LOOKAHEAD, temperature, *window) for temperature in (0.0, 0.8) for window in WINDOWS[scale.is_full]
    ]
    return [(JACOBI, 0.0), (JACOBI, 0.8), *windows, ("exits", 0.0)]


def measure(pair: ModelPair, key: Key) -> dict[str, Any]:
    """The row of one arm."""
    method, temperature = str(key[0]), float(key[1])
    if method == "exits":
        return exits(pair)
    if method == JACOBI:
        return steps(pair, method, temperature, JacobiProposer())
    width, size = int(key[2]), int(key[3])
    return steps(pair, method, temperature, LookaheadProposer(width, size)) | {"window": width, "ngram": size}


def steps(pair: ModelPair, method: str, temperature: float, proposer: BatchedProposer) -> dict[str, Any]:
    """Tokens per step and rows per step of one proposer, every row of which is computed."""
    verifier = VerifierSettings(
        model=str(pair.target_path), budget="fixed", threads=1, kv_mb=256, cache_dir=None
    )
    params = SamplingParams(temperature=temperature)
    engine = MeteredEngine(verifier, (method,), NODE_LIMIT, proposers={method: proposer})
    runs = [
        engine.decode([prompt], pair.scale.tokens, params, seed) for seed, prompt in enumerate(pair.prompts)
    ]
    rounds = sum(run.counts.rounds for run in runs)
    rows = 1 + sum(run.counts.nodes + run.counts.scouts for run in runs) / rounds
    per_step = sum(len(run.counted) for run in runs) / rounds
    return {
        "method": method,
        "temperature": temperature,
        "identical": pair.are_plain(temperature, [run.ids[0] for run in runs]),
        "rows": round(rows, 2),
        "tokens_per_step": round(per_step, 3),
        "speed": round(per_step / pass_cost(round(rows)), 3),
    }


def exits(pair: ModelPair) -> dict[str, Any]:
    """How often the layers up to an exit choose the target's token."""
    model = load_model(str(pair.target_path), device="cpu", dtype="float32")
    texts = Continuations(model, pair.prompts[:4], min(32, pair.scale.tokens))
    hits = [
        {"layers": layer, "hit": round(texts.acceptance(whole_layers(range(layer, texts.layers))), 4)}
        for layer in range(1, texts.layers)
    ]
    return {"method": "exits", "temperature": 0.0, "by_layer": hits}


def judge(rows: Rows) -> Sequence[Judged]:
    """Holds the predictions against the rows."""
    jacobi = only(rows, method=JACOBI, temperature=0.0)["tokens_per_step"]
    greedy, sampled = (where(rows, method=LOOKAHEAD, temperature=at) for at in (0.0, 0.8))
    low, high = (pick(each["tokens_per_step"] for each in greedy) for pick in (min, max))
    gap = max(
        one["tokens_per_step"] - other["tokens_per_step"] for one, other in zip(greedy, sampled, strict=True)
    )
    fastest = max(each["speed"] for each in greedy)
    hits = {each["layers"]: each["hit"] for each in only(rows, method="exits")["by_layer"]}
    half = hits[max(hits) // 2 + 1]
    same = all(row.get("identical", True) for row in rows)
    return (
        Judged(f"{jacobi:.2f} tokens a step", 1.05 <= jacobi <= 1.15),
        Judged(f"{low:.2f} to {high:.2f} tokens a step", low >= 1.2 and high <= 1.6),
        Judged(f"the fastest window has {fastest:.2f} of plain decoding's speed", fastest < 1),
        Judged(f"sampled text has up to {gap:.2f} tokens a step less", gap <= 0.1),
        Judged(f"half of the layers choose the target's token {half:.2f} of the time", half < 0.5),
        Judged("all ids are plain decoding's" if same else "some ids differ", same),
    )


def panels(rows: Rows) -> Sequence[Panel]:
    """Tokens per step over rows per step, and hits by exit."""
    curves = [
        line(
            f"{method}, T = {at:g}",
            sorted(where(rows, method=method, temperature=at), key=lambda row: math.log(row["rows"])),
            "rows",
            "tokens_per_step",
        )
        for method in (LOOKAHEAD, JACOBI)
        for at in (0.0, 0.8)
    ]
    hits = only(rows, method="exits")["by_layer"]
    return (
        Panel("More rows for fewer steps", "rows a step", "tokens a step", tuple(curves), is_log_x=True),
        Panel("Early exits", "layers", "hits", (line("greedy", hits, "layers", "hit"),)),
    )


X9 = Experiment(
    name="X9",
    question="What do rows buy without a drafter: Jacobi, Lookahead, early exits?",
    predictions=(
        "Jacobi decoding commits 1.05 to 1.15 tokens a step",
        "Lookahead commits 1.2 to 1.6 tokens a step",
        "at this processor's price of rows no window of Lookahead is faster than plain decoding",
        "sampled text gains as much as greedy text (within .1 tokens a step)",
        "half of the layers choose the target's token less than half of the time",
        "no method changes a token",
    ),
    refuted_by="a window that is faster than plain decoding where rows are not free",
    keys=keys,
    measure=measure,
    judge=judge,
    panels=panels,
)
