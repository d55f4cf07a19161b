"""Compares ways to grow a drafter's tree on a virtual clock, with real models and without processes.

The target's own continuations are computed first, as drafts never change them. Then a verifier and a drafter
that never stop run side by side in simulated time with given step costs, through the real drafting session
and the real draft pool, so that no noise of the machine enters. Run
`outrider bench drafter_sim [--children K ...]`. The last line is one JSON object; docs/figures/drafter_sim.md
says what each field means.
"""

import argparse
import time
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from benchmarks.shared.envelope import MODELS, command_line, print_result
from benchmarks.shared.heldout import HELD_OUT, held_out_records, repeated
from drafter_service.draft_tree import Growth
from drafter_service.drafters import load
from drafter_service.settings import DRAFTERS, DrafterSettings
from outrider.lm.runner import PackedLM
from outrider.pair.simulation import Scene, Simulation, Tally, continuation
from outrider.tokens import TokenTable
from speculative.params import SamplingParams
from speculative.survival_curve import SurvivalCurve


def flags() -> argparse.Namespace:
    """Parses the flags: models, prompts, and one flag for every field of `Growth` and `Scene`."""
    parser = command_line("drafter_sim", (__doc__ or "").splitlines()[0], "print the last line only")
    parser.add_argument("--target", type=Path, default=MODELS / "target", help="folder of the target model")
    parser.add_argument("--drafter", type=Path, default=MODELS / "drafter", help="folder of the drafter")
    parser.add_argument("--kind", choices=sorted(DRAFTERS), default="causal_lm", help="kind of the drafter")
    parser.add_argument("--ngram-text", nargs="+", default=[], help="with --kind ngram: text files to count")
    parser.add_argument("--prompts", type=Path, default=HELD_OUT, help="JSON lines with a `prompt` each")
    parser.add_argument(
        "--repeated", action="store_true", help="repeat the first half of each prompt behind the prompt"
    )
    parser.add_argument("--count", type=int, default=8, help="number of prompts used")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens per prompt")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 0.8], help="one or more")
    parser.add_argument(
        "--uncorrected", action="store_true", help="do not let the drafter correct its estimates"
    )
    for field in (*fields(Growth), *fields(Scene)):
        parser.add_argument(
            f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default
        )
    return parser.parse_args()


def from_flags(kind: type[Any], args: argparse.Namespace) -> Any:
    """A dataclass of this kind with its fields as the flags give them."""
    return kind(**{field.name: getattr(args, field.name) for field in fields(kind)})


def main() -> None:
    """Simulates decoding at each temperature and prints the result."""
    args, started = flags(), time.perf_counter()
    growth, scene = from_flags(Growth, args), from_flags(Scene, args)
    target = PackedLM.load(args.target, check=False)
    drafter = load(
        DrafterSettings(
            model=str(args.drafter),
            drafter=args.kind,
            ngram_text=tuple(args.ngram_text),
            device="cpu",
            threads=1,
            passes="eager",
        )
    )
    tokens = TokenTable.from_json(target.tokenizer_json or "")
    found = {}
    for temperature in args.temperature:
        tally, params = Tally(), SamplingParams(temperature=temperature)
        learnt = [SurvivalCurve() for _ in range(1 + len(drafter.abilities.masks))]
        for seed, record in enumerate(held_out_records(args.count, args.prompts)):
            text = record["prompt"]
            prompt = tokens.encode(repeated(text) if args.repeated else text)
            truth = continuation(target, prompt, params, seed, args.tokens)
            curves = () if args.uncorrected else [SurvivalCurve(prior) for prior in learnt]
            Simulation(drafter, truth, growth, scene, tally, curves=curves).run()
        found[f"{temperature:g}"] = tally.summary()
        if not args.json:
            print(f"temperature {temperature:g}: {found[f'{temperature:g}']}", flush=True)
    settings = {"growth": asdict(growth), "scene": asdict(scene), "count": args.count, "tokens": args.tokens}
    settings |= {"uncorrected": args.uncorrected, "repeated": args.repeated, "kind": args.kind}
    print_result("drafter_sim", settings, started, {"by_temperature": found})


if __name__ == "__main__":
    main()
