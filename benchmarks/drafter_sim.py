"""What a drafter's tree gives, on a virtual clock: real models, the real follower and merge, no processes.

The target's own continuations are computed first; drafts never change them. Then a verifier and a
drafter that never stop run side by side in simulated time with given step costs, so that ways to grow
trees can be compared without the machine's noise. Run `python benchmarks/drafter_sim.py [--children K
...]`. The last line is one JSON object.
"""

import argparse
import json
import time
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from envelope import REPOSITORY, print_result

from drafter_service.draft_tree import Growth
from drafter_service.drafters.causal_lm import CausalLMDrafter
from outrider.lm.packed import PackedLM
from outrider.pair.simulation import Scene, Simulation, Tally, continuation
from outrider.tokens import TokenTable
from speculative.params import SamplingParams


def flags() -> argparse.Namespace:
    """The command line: models, prompts, and a flag for every field of `Growth` and `Scene`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="the last line only")
    parser.add_argument("--target", type=Path, default=REPOSITORY / "models/target")
    parser.add_argument("--drafter", type=Path, default=REPOSITORY / "models/drafter")
    parser.add_argument("--prompts", type=Path, default=REPOSITORY / "models/heldout.jsonl")
    parser.add_argument("--count", type=int, default=8, help="prompts used")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens per prompt")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 0.8])
    for one in (*fields(Growth), *fields(Scene)):
        parser.add_argument(f"--{one.name.replace('_', '-')}", type=type(one.default), default=one.default)
    return parser.parse_args()


def picked(kind: type[Any], args: argparse.Namespace) -> Any:
    """The fields of a dataclass as the flags say."""
    return kind(**{one.name: getattr(args, one.name) for one in fields(kind)})


def main() -> None:
    """Simulates greedy and sampled decoding."""
    args, started = flags(), time.perf_counter()
    growth, scene = picked(Growth, args), picked(Scene, args)
    target = PackedLM.load(args.target, check=False)
    drafter = CausalLMDrafter(PackedLM.load(args.drafter, check=False))
    tokens = TokenTable.from_json(target.tokenizer_json or "")
    found = {}
    for temperature in args.temperature:
        tally, params = Tally(), SamplingParams(temperature=temperature)
        for seed, line in enumerate(args.prompts.read_text().splitlines()[: args.count]):
            prompt = tokens.encode(json.loads(line)["prompt"])
            truth = continuation(target, prompt, params, seed, args.tokens)
            Simulation(drafter, truth, growth, scene, tally).run()
        found[f"{temperature:g}"] = tally.summary()
        if not args.json:
            print(f"temperature {temperature:g}: {found[f'{temperature:g}']}", flush=True)
    settings = {"growth": asdict(growth), "scene": asdict(scene), "count": args.count, "tokens": args.tokens}
    print_result("drafter_sim", settings, started, {"by_temperature": found})


if __name__ == "__main__":
    main()
