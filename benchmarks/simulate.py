"""Runs random scenarios of requests and faults against the real services, on a virtual clock and network.

Every seed is one scenario of clients, orchestrators, verifiers, sources and a store. Some of them die,
freeze, are cut off or come back empty. Anything wrong with a stream, a fence or a leftover is a violation;
see docs/simulation.md. Run `outrider bench simulate --seeds 1000`; `--seed S --seeds 1 --trace` replays one.
The last line is one JSON object. docs/figures/simulate.md says what each field means.
"""

import argparse
import math
import time
from dataclasses import asdict
from typing import Any

from benchmarks.shared.envelope import command_line, print_result
from benchmarks.simulation.bugs import BUGS
from benchmarks.simulation.plan import Additions
from benchmarks.simulation.search import SearchResult, search, trace


def flags() -> argparse.Namespace:
    """Parses the flags."""
    parser = command_line("simulate", (__doc__ or "").splitlines()[0], "print the last line only")
    parser.add_argument("--seeds", type=int, default=1000, help="number of scenarios")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first scenario")
    parser.add_argument(
        "--seconds",
        type=float,
        default=math.inf,
        help="begin no further seed after this time; the result's next_seed is the seed to go on with",
    )
    parser.add_argument("--processes", type=int, default=2, help="processes that simulate at once")
    parser.add_argument("--trace", action="store_true", help="print the events of all seeds, in order")
    parser.add_argument("--bug", choices=sorted(BUGS), default="", help="plant this bug, to see it found")
    parser.add_argument(
        "--drafters",
        type=int,
        default=0,
        help="give every scenario this number of drafters of one name, one of which fails",
    )
    parser.add_argument("--heads", action="store_true", help="give verifiers of every second scenario a head")
    parser.add_argument(
        "--swaps", action="store_true", help="have the drafter of every second scenario swap its weights"
    )
    return parser.parse_args()


def summary(found: SearchResult) -> dict[str, Any]:
    """The fields of the result except the envelope's."""
    return {
        "seeds": found.seeds,
        "next_seed": found.next_seed,
        "violations": len(found.failing),
        "failing": [
            {"seed": seed, "violations": what[:5]} for seed, what in sorted(found.failing.items())[:20]
        ],
        "seeds_per_second": round(found.seeds / found.seconds, 1) if found.seconds else 0.0,
        "ms_per_seed": round(1000 * found.cpu_seconds / found.seeds, 2) if found.seeds else 0.0,
        "happened": dict(sorted(found.counts.items())),
    }


def main() -> None:
    """Searches or traces and prints the result; exits with 1 where a seed has a violation."""
    args, started = flags(), time.perf_counter()
    seeds = range(args.seed, args.seed + args.seeds)
    additions = Additions(args.drafters, args.heads, args.swaps)
    if args.trace:
        found = trace(seeds, args.bug, additions)
    else:
        found = search(
            seeds,
            args.processes,
            args.bug,
            additions=additions,
            seconds=args.seconds,
            progress=not args.json,
        )
    settings = {"seed": args.seed, "processes": args.processes, "bug": args.bug} | asdict(additions)
    print_result("simulate", settings, started, summary(found))
    raise SystemExit(1 if found.failing else 0)


if __name__ == "__main__":
    main()
