"""Measures contrastive decoding: speculative beside plain, and how much the text repeats itself, by strength.

Run as `outrider bench contrast --json`. docs/figures/contrast.md says what each field means.
"""

import argparse
import time
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from benchmarks.shared.envelope import add_pair, command_line, print_result, settings_of
from benchmarks.shared.figures import (
    TimedRun,
    acceptance_length,
    accepted_share,
    alternating_orders,
    paired_ratio,
    same_ids,
    tokens_per_second,
)
from benchmarks.shared.heldout import load_prompts
from benchmarks.shared.services import UpServices
from outrider.client import Client

PLAIN, SPECULATIVE = "plain", "speculative"


def repeated_share(ids: Sequence[int], size: int = 4) -> float:
    """The share of runs of `size` ids that occurred before in the same text."""
    runs = [tuple(ids[start : start + size]) for start in range(len(ids) - size + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def arm_name(way: str, strength: float) -> str:
    """Name of an arm's runs."""
    return f"{way} {strength:g}"


def figures(runs: Sequence[TimedRun], strength: float) -> dict[str, Any]:
    """The figures of one strength."""
    plain, speculative = arm_name(PLAIN, strength), arm_name(SPECULATIVE, strength)
    own = [run for run in runs if run.arm == speculative]
    return {
        "identical": same_ids(runs, (plain, speculative)),
        "acceptance_length": acceptance_length(own),
        "accepted_share": accepted_share(own),
        "tokens_per_second": {
            PLAIN: tokens_per_second(run for run in runs if run.arm == plain),
            SPECULATIVE: tokens_per_second(own),
        },
        "speculative_over_plain": paired_ratio(runs, speculative, plain),
        "repeated_4_grams": round(fmean(repeated_share(run.ids) for run in own if run.repeat == 0), 4),
    }


def measure(settings: argparse.Namespace) -> dict[str, Any]:
    """Starts the services, with the drafter as the amateur, and measures every strength."""
    prompts = load_prompts(settings.target, settings.prompts)
    strengths = [float(text) for text in settings.strengths.split(",")]
    arms = {arm_name(way, s): (way, s) for s in strengths for way in (PLAIN, SPECULATIVE)}
    orders = alternating_orders(arms)
    runs: list[TimedRun] = []
    up = UpServices(settings.target, settings.drafter, OUTRIDER_UP__AMATEUR=settings.drafter)
    with up, Client(up.address) as client:
        for repeat in range(settings.repeats):
            for at, prompt in enumerate(prompts):
                for arm in next(orders):
                    way, strength = arms[arm]
                    began = time.perf_counter()
                    done = client.generate(
                        ids=prompt,
                        max_tokens=settings.tokens,
                        temperature=settings.temperature,
                        seed=1000 + at,
                        ignore_eos=True,
                        contrast_strength=strength,
                        speculation=way == SPECULATIVE,
                        tenant=f"{arm} {repeat} {at}",  # tenants share nothing: every request is cold
                        timeout=120,
                    )
                    seconds = time.perf_counter() - began
                    accepted = tuple(sorted(done.usage.accepted_by_source.items()))
                    rounds = done.usage.rounds
                    runs.append(TimedRun(arm, at, repeat, done.ids, seconds, rounds, accepted))
    rows = {f"{strength:g}": figures(runs, strength) for strength in strengths}
    return {"identical": all(row["identical"] for row in rows.values()), "by_strength": rows}


def parse() -> argparse.Namespace:
    """Parses the flags; the figures in the docs have the default flags."""
    parser = command_line("contrast", __doc__)
    add_pair(parser)
    parser.add_argument("--strengths", default="0,0.5,1", help="weights of the amateur")
    parser.add_argument("--prompts", type=int, default=6, help="number of held-out prompts")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of each request")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=2, help="repeats of every run")
    return parser.parse_args()


def main() -> None:
    """Measures, and prints the result."""
    settings = parse()
    started = time.perf_counter()
    print_result("contrast", settings_of(settings), started, measure(settings))


if __name__ == "__main__":
    main()
