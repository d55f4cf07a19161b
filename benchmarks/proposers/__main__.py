"""Measures each way of drafting inside the target's process, alone and together with all others.

Run as `outrider bench proposers --json`. docs/figures/proposers.md says what each field means.
"""

import argparse
import sys
import time
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from benchmarks.proposers.forced import agreement
from benchmarks.proposers.metered_engine import MeteredEngine
from benchmarks.proposers.method_figures import ALL, MODES, PLAIN, MethodRuns
from benchmarks.shared.cache_dir import cache_for
from benchmarks.shared.envelope import MODELS, command_line, print_result, settings_of
from benchmarks.shared.heldout import load_prompts
from outrider.lm.heads.config import HeadConfig
from outrider.lm.heads.published import head_class
from speculative.errors import InvalidRequest, OutriderError
from training.heads.frozen import FrozenTarget
from verifier_service.engine.step_cost import StepCostModel
from verifier_service.proposers import BATCHED_PROPOSERS
from verifier_service.proposers.planning import SMALL_MODEL
from verifier_service.settings import VerifierSettings, named_head

LOOKUP = "lookup"
(SMALL_MODEL_NAME,) = SMALL_MODEL
FORCED_DEPTH = 3
"""Places of a draft that are compared on given contexts."""


def engines_of(settings: argparse.Namespace) -> dict[str, MeteredEngine]:
    """An engine for plain decoding, one for each method, and one for all methods together."""
    heads = {name: f"{name}={folder}" for name, folder in _heads(settings).items()}
    small = {SMALL_MODEL_NAME: settings.small_model} if settings.small_model else {}
    methods = (LOOKUP, *settings.proposers, *heads, *small)

    def engine(*sources: str, costs: StepCostModel | None = None) -> MeteredEngine:
        made = VerifierSettings(
            model=settings.target,
            proposers=tuple(name for name in settings.proposers if name in sources),
            heads=tuple(text for name, text in heads.items() if name in sources),
            small_model="".join(folder for name, folder in small.items() if name in sources),
            budget=settings.budget,
            threads=1,
            kv_mb=256,
            passes=settings.passes,
            cache_dir=cache_for(settings.passes),
        )
        return MeteredEngine(made, sources, settings.nodes, costs)

    plain = engine()
    costs = deepcopy(plain.costs)  # one measurement for all, so that methods differ by their drafts alone
    engines = {PLAIN: plain} | {name: engine(name, costs=costs) for name in methods}
    return engines | {ALL: engine(*methods, costs=costs)}


def _heads(settings: argparse.Namespace) -> dict[str, str]:
    """Folder of each head by its source name. Raises OutriderError for one that cannot be read or named."""
    folders: dict[str, str] = {}
    for given, folder in map(named_head, settings.heads):
        name = given or head_class(HeadConfig.read(folder)).kind
        if name in folders:
            raise InvalidRequest(f"two heads are called {name!r}; rename the second: NAME={folder}")
        folders[name] = folder
    return folders


def measure(settings: argparse.Namespace) -> dict[str, Any]:
    """All fields of the result except the envelope's."""
    engines = engines_of(settings)
    prompts = load_prompts(settings.target, settings.prompts)
    for engine in engines.values():
        engine.decode(prompts[:1], min(24, settings.tokens), MODES["greedy"], 0)
    runs = {
        mode: {
            count: MethodRuns(engines, prompts, settings.tokens, mode, count) for count in settings.streams
        }
        for mode in MODES
    }
    for warm_up in range(settings.warm_up):
        for by_streams in runs.values():
            for one in by_streams.values():
                one.warm_up()
        print(f"warm-up {warm_up + 1} of {settings.warm_up}", file=sys.stderr)
    for repeat in range(settings.repeats):
        for by_streams in runs.values():
            for one in by_streams.values():
                one.repeat(repeat)
        print(f"repeat {repeat + 1} of {settings.repeats}", file=sys.stderr)
    figures = {
        mode: {str(count): one.fields() for count, one in by_streams.items()}
        for mode, by_streams in runs.items()
    }
    rows = [row for by_streams in figures.values() for found in by_streams.values() for row in found.values()]
    return {
        "identical": all(row["identical"] for row in rows),
        "figures": figures,
        "all_over_best": {
            mode: {str(count): one.all_over_best() for count, one in by_streams.items()}
            for mode, by_streams in runs.items()
        },
        "teacher_forced": _forced(settings, engines[PLAIN], prompts),
        "muted": {name: engine.muted for name, engine in engines.items() if engine.muted},
    }


def _forced(
    settings: argparse.Namespace, plain: MeteredEngine, prompts: list[tuple[int, ...]]
) -> dict[str, Any]:
    """Agreement of each head with the target on the target's greedy and sampled text."""
    heads = _heads(settings)
    if not heads:
        return {}
    texts = [
        (*prompt, *ids)
        for params in MODES.values()
        for prompt, ids in zip(prompts, plain.decode(prompts, settings.tokens, params, 1000).ids, strict=True)
    ]
    lengths = [len(prompt) for prompt in prompts] * len(MODES)
    target = FrozenTarget.load(settings.target, "cpu")
    return {name: agreement(target, Path(head), texts, lengths, FORCED_DEPTH) for name, head in heads.items()}


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _embedded_heads() -> list[str]:
    return [str(path.parent) for path in sorted((MODELS / "heads").glob("*/config.json"))]


def parse() -> argparse.Namespace:
    """Parses the flags; the figures in the docs have the default flags."""
    parser = command_line("proposers", __doc__, is_curve=True)
    parser.add_argument("--target", default=str(MODELS / "target"), help="folder of the target model")
    parser.add_argument(
        "--heads",
        type=_names,
        default=_embedded_heads(),
        help="folders of heads, each with NAME= before it as `--heads` of the verifier takes them, "
        "comma-separated; by default the embedded ones",
    )
    parser.add_argument(
        "--proposers",
        type=_names,
        default=list(BATCHED_PROPOSERS),
        help="batched proposers without weights, comma-separated; by default all",
    )
    parser.add_argument(
        "--small-model",
        default=str(MODELS / "drafter"),
        help="folder of a drafter that drafts inside the target's process; empty: none",
    )
    parser.add_argument(
        "--streams",
        type=lambda text: [int(count) for count in text.split(",")],
        default=[1, 8],
        help="streams at once, comma-separated",
    )
    parser.add_argument("--prompts", type=int, default=8, help="number of held-out prompts")
    parser.add_argument("--tokens", type=int, default=96, help="tokens of each stream")
    parser.add_argument("--nodes", type=int, default=16, help="most drafted nodes of a stream in a round")
    parser.add_argument(
        "--budget", choices=("adaptive", "fixed"), default="adaptive", help="as `--budget` of the verifier"
    )
    parser.add_argument(
        "--passes",
        choices=("eager", "compiled"),
        default="eager",
        help="passes of the target, of heads and of the small model, as `--passes` of the verifier",
    )
    parser.add_argument("--repeats", type=int, default=2, help="repeats of every method on every prompt")
    parser.add_argument(
        "--warm-up",
        type=int,
        default=0,
        help="repeats before those, which are not counted: methods that do not pay come to rest in them",
    )
    settings = parser.parse_args()
    if max(settings.streams) > settings.prompts:
        parser.error(f"--streams {max(settings.streams)} is more than --prompts {settings.prompts}")
    try:
        _heads(settings)
    except OutriderError as error:
        parser.error(f"--heads: {error}")
    return settings


def main() -> None:
    """Loads an engine for each method, measures and prints the result."""
    settings = parse()
    started = time.perf_counter()
    torch.set_num_threads(1)
    fields = measure(settings)
    print_result("proposers", settings_of(settings), started, fields, settings.plot)


if __name__ == "__main__":
    main()
