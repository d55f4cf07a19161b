"""Keys and values in int8 beside floats: what a token costs, how fast and how alike sessions decode.

Each arm is an engine over the target with its own pool, one stream at a time, in processor time; arms take
turns, prompt by prompt, so that ratios hold on a busy machine. docs/figures/kv.md says what each field means.
"""

import argparse
import tempfile
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.proposers.metered_engine import DecodedStreams, MeteredEngine
from benchmarks.shared.envelope import add_pair, command_line, print_result, settings_of
from benchmarks.shared.heldout import load_prompts
from speculative.params import SamplingParams
from verifier_service.settings import VerifierSettings

MODES = {"greedy": 0.0, "sampled": 0.8}
PROFILES = ("fast", "deterministic")
DTYPES = ("float32", "int8")
SOURCES = ("lookup", "small-model")


class Arm(NamedTuple):
    """How keys and values are kept, and whether sessions draft."""

    profile: str
    dtype: str
    drafts: bool


ARMS = tuple(Arm(*arm) for arm in product(PROFILES, DTYPES, (False, True)))


def engine_of(arm: Arm, flags: argparse.Namespace, cache_dir: Path) -> MeteredEngine:
    """An engine for the arm, with a target and a pool of its own."""
    settings = VerifierSettings(
        model=flags.target,
        device="cpu",
        dtype="float32",
        deterministic=arm.profile == "deterministic",
        kv_dtype="int8" if arm.dtype == "int8" else "auto",
        passes="eager" if arm.profile == "deterministic" else flags.passes,
        small_model=flags.drafter if arm.drafts else "",
        budget="fixed",
        threads=1,
        kv_mb=64,
        cache_dir=cache_dir,
    )
    return MeteredEngine(settings, SOURCES if arm.drafts else (), flags.nodes if arm.drafts else 0)


def alike(ids: Sequence[int], expected: Sequence[int]) -> float:
    """Share of a stream's ids that come before the first one that differs."""
    same = next((at for at, pair in enumerate(zip(ids, expected, strict=True)) if pair[0] != pair[1]), None)
    return 1.0 if same is None else same / len(expected)


def figures(profile: str, dtype: str, runs: dict[Arm, list[DecodedStreams]]) -> dict[str, Any]:
    """What one way of keeping keys and values gives in one mode, over all prompts."""
    plain, drafted = runs[Arm(profile, dtype, False)], runs[Arm(profile, dtype, True)]
    floats = runs[Arm(profile, "float32", False)]

    def speed(made: list[DecodedStreams]) -> float:
        return round(sum(len(one.counted) for one in made) / sum(one.seconds for one in made), 1)

    same = [one.ids == other.ids for one, other in zip(drafted, plain, strict=True)]
    shares = [alike(one.ids[0], other.ids[0]) for one, other in zip(plain, floats, strict=True)]
    return {
        "identical": sum(same),
        "acceptance_length": round(
            sum(len(one.counted) for one in drafted) / max(1, sum(one.counts.rounds for one in drafted)), 3
        ),
        "plain_tokens_per_second": speed(plain),
        "speculative_tokens_per_second": speed(drafted),
        "streams_equal_to_float": sum(share == 1.0 for share in shares),
        "ids_before_a_difference": round(sum(shares) / len(shares), 4),
    }


def measure(flags: argparse.Namespace, cache_dir: Path) -> dict[str, Any]:
    """All fields of the result except the envelope's."""
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
        found[mode] = {
            profile: {dtype: figures(profile, dtype, runs) for dtype in DTYPES} for profile in PROFILES
        }
    sizes = {dtype: engines[Arm("fast", dtype, False)].slot_bytes for dtype in DTYPES}
    for engine in engines.values():
        engine.target.close()
    return {"streams": len(prompts), "bytes_per_token": sizes, "figures": found}


def parse() -> argparse.Namespace:
    """Parses the flags; beside each figure, the docs say with which flags it was measured."""
    parser = command_line("kv", __doc__)
    add_pair(parser)
    parser.add_argument(
        "--passes", choices=("eager", "compiled"), default="eager", help="how passes of the fast profile run"
    )
    parser.add_argument("--prompts", type=int, default=16, help="held-out prompts, each one stream")
    parser.add_argument("--prompt", type=int, default=256, help="most tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=96, help="tokens of each stream")
    parser.add_argument("--nodes", type=int, default=8, help="most drafted nodes of a round")
    return parser.parse_args()


def main() -> None:
    """Runs the benchmark and prints the result."""
    flags = parse()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="outrider-kv-") as cache_dir:
        print_result("kv", settings_of(flags), started, measure(flags, Path(cache_dir)))


if __name__ == "__main__":
    main()
