"""Weights of linear layers in bfloat16 and int8 beside float32: how fast, how alike and how large.

Each arm is an engine over the target with its own weights, one stream at a time, in processor time; the
drafter keeps float32. Arms take turns, prompt by prompt, and passes take turns one by one, so that
ratios hold on a busy machine. docs/figures/weights.md says what each field means.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.determinism import TEMPERATURE
from benchmarks.packed_step import CONTEXT, build, packed_pass
from benchmarks.proposers.metered_engine import DecodedStreams, MeteredEngine
from benchmarks.shared.cache_dir import kept_or_temporary
from benchmarks.shared.envelope import add_pair, command_line, print_result, settings_of
from benchmarks.shared.heldout import load_prompts
from outrider.lm.autotune.products import TunedProduct
from outrider.lm.compiled.panels import products_of, smallest_panels
from outrider.lm.plan import SequenceRows
from outrider.lm.runner import PackedLM
from outrider.lm.weight_only.product import WeightOnlyProduct
from speculative.noise import gumbel
from speculative.params import SamplingParams
from verifier_service.settings import VerifierSettings

MODES = {"greedy": 0.0, "sampled": TEMPERATURE}
FORMATS = ("float32", "bfloat16", "int8")
SOURCES = ("lookup", "small-model")
ROWS = (1, 2, 4, 8, 16, 64)
LAYERS = 4
"""Layers of the random wide model."""
WARM_UP = 3


class Arm(NamedTuple):
    """The format of the target's weights, and whether sessions draft."""

    weights: str
    drafts: bool


ARMS = tuple(Arm(*arm) for arm in product(FORMATS, (False, True)))


def weight_dtype(weights: str) -> Any:
    """The setting for a format; float32 is that of the passes."""
    return "auto" if weights == "float32" else weights


def engine_of(arm: Arm, flags: argparse.Namespace, cache_dir: Path) -> MeteredEngine:
    """An engine for the arm, with a target of its own."""
    settings = VerifierSettings(
        model=flags.target,
        device="cpu",
        dtype="float32",
        weight_dtype=weight_dtype(arm.weights),
        passes=flags.passes,
        small_model=flags.drafter if arm.drafts else "",
        budget="fixed",
        threads=1,
        kv_mb=64,
        cache_dir=cache_dir,
    )
    return MeteredEngine(settings, SOURCES if arm.drafts else (), flags.nodes if arm.drafts else 0)


def speed(made: list[DecodedStreams]) -> float:
    """Tokens in a second of processor time, from each stream's second token on."""
    return sum(len(one.counted) for one in made) / sum(one.seconds for one in made)


def ratio(made: list[DecodedStreams], beside: list[DecodedStreams]) -> float:
    """Median over the prompts of how many times as fast the first run of a pair is."""
    return statistics.median(speed([one]) / speed([other]) for one, other in zip(made, beside, strict=True))


def figures(weights: str, runs: dict[Arm, list[DecodedStreams]], other_ids: float) -> dict[str, Any]:
    """What one format gives in one mode, over all prompts."""
    plain, drafted = runs[Arm(weights, False)], runs[Arm(weights, True)]
    plain_floats, drafted_floats = runs[Arm("float32", False)], runs[Arm("float32", True)]
    rounds = sum(one.counts.rounds for one in drafted)
    return {
        "identical": sum(one.ids == other.ids for one, other in zip(drafted, plain, strict=True)),
        "acceptance_length": round(sum(len(one.counted) for one in drafted) / max(1, rounds), 3),
        "plain_tokens_per_second": round(speed(plain), 1),
        "speculative_tokens_per_second": round(speed(drafted), 1),
        "plain_ratio": round(ratio(plain, plain_floats), 3),
        "speculative_ratio": round(ratio(drafted, drafted_floats), 3),
        "streams_equal_to_float": sum(
            one.ids == other.ids for one, other in zip(plain, plain_floats, strict=True)
        ),
        "other_ids_per_1000": round(other_ids, 2),
    }


def choices(
    lm: PackedLM, ids: Sequence[int], prompt: int, temperature: float, seed: int
) -> NDArray[np.int64]:
    """The id that the model chooses at each position behind the prompt, over the text ``ids`` before it."""
    table = lm.table(reserve=len(ids))
    wanted = range(prompt - 1, len(ids) - 1)
    rows = lm.forward([SequenceRows(table, ids, range(-1, len(ids) - 1), wanted)]).rows()
    lm.release(table)
    scores = rows.astype(np.float64)
    if temperature:
        noise = [gumbel(seed, row + 1, lm.vocabulary_size) for row in wanted]
        scores = scores / temperature + np.stack(noise)
    chosen: np.ndarray = scores.argmax(-1)
    return chosen


def other_ids(
    engines: dict[Arm, MeteredEngine], texts: list[tuple[Sequence[int], int]], temperature: float
) -> dict[str, float]:
    """Positions of float32's texts at which a format chooses another id than float32, per 1,000."""
    found = {
        weights: [
            choices(engines[Arm(weights, False)].target, ids, prompt, temperature, seed)
            for seed, (ids, prompt) in enumerate(texts)
        ]
        for weights in FORMATS
    }
    own = np.concatenate(found["float32"])
    return {weights: 1000 * float((np.concatenate(of) != own).mean()) for weights, of in found.items()}


def streams(flags: argparse.Namespace, cache_dir: Path) -> tuple[dict[str, Any], dict[str, PackedLM]]:
    """Fields of decoded streams by mode and format, and the targets by format."""
    engines = {arm: engine_of(arm, flags, cache_dir) for arm in ARMS}
    prompts = [ids[-flags.prompt :] for ids in load_prompts(flags.target, flags.prompts)]
    for engine in engines.values():
        engine.decode(prompts[:1], 8, SamplingParams(temperature=0.0), 0)
    found: dict[str, Any] = {}
    for mode, temperature in MODES.items():
        runs: dict[Arm, list[DecodedStreams]] = {arm: [] for arm in ARMS}
        params = SamplingParams(temperature=temperature, ignore_eos=True)
        for seed, prompt in enumerate(prompts):
            for arm in ARMS if seed % 2 else reversed(ARMS):
                runs[arm].append(engines[arm].decode([prompt], flags.tokens, params, seed))
        plain = runs[Arm("float32", False)]
        texts: list[tuple[Sequence[int], int]] = [
            ((*prompt, *one.ids[0]), len(prompt)) for prompt, one in zip(prompts, plain, strict=True)
        ]
        changed = other_ids(engines, texts, temperature)
        found[mode] = {weights: figures(weights, runs, changed[weights]) for weights in FORMATS}
    return found, {weights: engines[Arm(weights, False)].target for weights in FORMATS}


def weight_mb(lm: PackedLM) -> float:
    """Memory of a model's linear layers as its passes keep them, in MB."""
    total = 0
    for one in products_of(lm.model):
        if isinstance(one, WeightOnlyProduct):
            packed = one.packed
            total += packed.panels.nbytes + (0 if packed.scales is None else packed.scales.nbytes)
        elif isinstance(one, TunedProduct):
            total += 4 * len(one.laid_out) * one.out_features * one.in_features
            if lm.compiled is not None:
                total += smallest_panels(one.weight(), width=32).nbytes
    return round(total / 1e6, 2)


def pass_figures(models: dict[str, PackedLM], repeats: int) -> dict[str, Any]:
    """Median ms of float32's passes by number of rows, and the median ratio of the other formats to them."""
    found: dict[str, Any] = {}
    for rows in ROWS:
        cases = {weights: packed_pass(lm, 1, rows) for weights, lm in models.items()}
        turns = [{weights: once() for weights, once in cases.items()} for _ in range(repeats + WARM_UP)]
        found[str(rows)] = {
            "float32_ms": round(statistics.median(turn["float32"] for turn in turns[WARM_UP:]), 3)
        } | {
            weights: round(statistics.median(turn[weights] / turn["float32"] for turn in turns[WARM_UP:]), 3)
            for weights in FORMATS[1:]
        }
    return found


def wide_models(flags: argparse.Namespace, cache_dir: Path) -> dict[str, PackedLM]:
    """A random Llama of --width by format, loaded as a service does."""
    with tempfile.TemporaryDirectory(prefix="outrider-wide-") as folder:
        model, _ = build(LAYERS, flags.width)
        model.bfloat16().save_pretrained(folder)
        del model
        found = {
            weights: PackedLM.load(folder, weight_dtype=weight_dtype(weights), kv_mb=256, cache_dir=cache_dir)
            for weights in FORMATS
        }
    if flags.passes == "compiled":
        for lm in found.values():
            lm.compile_passes("compiled", cache_dir)
    return found


def measure(flags: argparse.Namespace, cache_dir: Path) -> dict[str, Any]:
    """All fields of the result except the envelope's."""
    found, targets = streams(flags, cache_dir)
    sizes = {weights: weight_mb(lm) for weights, lm in targets.items()}
    passes = pass_figures(targets, flags.repeats)
    wide = wide_models(flags, cache_dir) if flags.width else {}
    fields = {
        "streams": flags.prompts,
        "context": CONTEXT,
        "figures": found,
        "weights_mb": sizes,
        "pass_ratios": passes,
        "wide_weights_mb": {weights: weight_mb(lm) for weights, lm in wide.items()},
        "wide_pass_ratios": pass_figures(wide, flags.repeats) if wide else {},
    }
    for lm in (*targets.values(), *wide.values()):
        lm.close()
    return fields


def parse() -> argparse.Namespace:
    """Parses the flags."""
    parser = command_line("weights", __doc__)
    add_pair(parser)
    parser.add_argument("--passes", choices=("eager", "compiled"), default="eager", help="how passes run")
    parser.add_argument("--prompts", type=int, default=12, help="held-out prompts, each one stream")
    parser.add_argument("--prompt", type=int, default=256, help="most tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=96, help="tokens of each stream")
    parser.add_argument("--nodes", type=int, default=8, help="most drafted nodes of a round")
    parser.add_argument("--repeats", type=int, default=30, help="repeats of each timed pass")
    parser.add_argument("--width", type=int, default=1024, help="width of the random model; 0: none")
    parser.add_argument("--cache", type=Path, help="folder that keeps compiled passes for later runs")
    return parser.parse_args()


def main() -> None:
    """Runs the benchmark and prints the result."""
    flags = parse()
    started = time.perf_counter()
    with kept_or_temporary(flags.cache) as cache_dir:
        torch.set_num_threads(1)
        print_result("weights", settings_of(flags, "cache"), started, measure(flags, cache_dir))


if __name__ == "__main__":
    main()
