"""One request at a time: plain and speculative decoding through the services beside the library's own.

Run as `outrider bench offline --json`. docs/figures.md says what each field means.
"""

import argparse
import concurrent.futures
import contextlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from envelope import REPOSITORY, print_result
from figures import Run, acceptance_length, accepted_share, paired_ratio, same_ids, tokens_per_second
from stack import Peer, Stack, peak_mb, stopped
from tokenizers import Tokenizer

from outrider.client import Client
from speculative.errors import Unavailable

Arm = Callable[[tuple[int, ...], float, int], Run]
OURS = ("plain", "speculative")
PEERS = {"hf_generate": "generate", "hf_assisted": "assisted", "hf_prompt_lookup": "prompt_lookup"}
SAMPLED_TEMPERATURE = 0.8
SPLIT_TOKENS = 96
"""Long enough that eight requests that start together are all ready in most steps."""
SPLIT_ATTEMPTS = 30
"""On a busy machine eight that start together may end before the last has begun."""


class Bench:
    """The arms over one stack and one peer, each timing one request."""

    def __init__(
        self, settings: argparse.Namespace, stack: Stack, peer: Peer, prompts: list[tuple[int, ...]]
    ) -> None:
        self.settings = settings
        self.stack = stack
        self.peer = peer
        self.prompts = prompts
        self.client = Client(stack.address)

    def ours(self, arm: str, sources: tuple[str, ...] | None = None) -> Arm:
        """An arm through the services; plain where it is called so."""

        def run(ids: tuple[int, ...], temperature: float, seed: int) -> Run:
            started = time.perf_counter()
            done = self.client.generate(
                ids=list(ids),
                max_tokens=self.settings.tokens,
                temperature=temperature,
                seed=seed,
                speculation=arm != "plain",
                sources=None if sources is None else list(sources),
            )
            seconds = time.perf_counter() - started
            accepted = tuple(sorted(done.usage.accepted_by_source.items()))
            return Run(arm, 0, 0, tuple(done.ids), seconds, done.usage.rounds, accepted)

        return run

    def peers(self, arm: str, threads: int) -> Arm:
        """An arm of the library with this many torch threads."""

        def run(ids: tuple[int, ...], temperature: float, seed: int) -> Run:
            made, seconds = self.peer.decode(
                method=PEERS[arm],
                ids=list(ids),
                max_tokens=self.settings.tokens,
                temperature=temperature,
                seed=seed,
                threads=threads,
            )
            return Run(arm, 0, 0, made, seconds)

        return run

    def interleave(self, arms: dict[str, Arm], temperature: float, repeats: int) -> list[Run]:
        """Every arm on every prompt, `repeats` times, in an order that turns round each time (ABBA)."""
        runs = []
        turns = itertools.cycle([list(arms), list(reversed(arms))])
        for repeat in range(repeats):
            for index, ids in enumerate(self.prompts):
                for name in next(turns):
                    run = arms[name](ids, temperature, 1000 + index)
                    runs.append(Run(name, index, repeat, run.ids, run.seconds, run.rounds, run.accepted))
            print(f"temperature {temperature}: repeat {repeat + 1} of {repeats}", file=sys.stderr)
        return runs

    def until_reachable(self) -> None:
        """After a pause: until the orchestrator takes the verifier for alive again."""
        deadline = time.perf_counter() + 30
        while True:
            try:
                self.client.generate(ids=list(self.prompts[0]), max_tokens=1)
            except Unavailable:
                if time.perf_counter() > deadline:
                    raise
                time.sleep(0.05)
            else:
                return

    def warm_up(self, arms: Iterable[Arm]) -> None:
        """Each arm once, untimed."""
        for arm in arms:
            arm(self.prompts[0], 0.0, 0)


def main_arms(bench: Bench) -> dict[str, Arm]:
    """Ours and the peers', each with one torch thread."""
    peers = (
        PEERS if bench.settings.drafter != "none" else {k: v for k, v in PEERS.items() if k != "hf_assisted"}
    )
    return {arm: bench.ours(arm) for arm in OURS} | {arm: bench.peers(arm, 1) for arm in peers}


def section(runs: list[Run], greedy: bool) -> dict[str, Any]:
    """The figures of one temperature."""
    arms = list(dict.fromkeys(run.arm for run in runs))
    ours = [run for run in runs if run.arm == "speculative"]
    must_agree = [*OURS, "hf_generate"] if greedy else list(OURS)
    return {
        "identical": same_ids(runs, must_agree),
        "acceptance_length": acceptance_length(ours),
        "accepted_share": accepted_share(ours),
        "tokens_per_second": {arm: tokens_per_second(r for r in runs if r.arm == arm) for arm in arms},
        "paired": {
            f"{arm}_over_{other}": paired_ratio(runs, arm, other)
            for arm, other in [("plain", "hf_generate")]
            + [("speculative", a) for a in arms if a != "speculative"]
        },
    }


def by_source(bench: Bench, plain: list[Run]) -> dict[str, Any]:
    """Each source alone, greedy, beside plain decoding of the same prompts."""
    names = bench.client.models()[0].sources
    rows = {}
    for name in names:
        runs = bench.interleave({name: bench.ours(name, (name,))}, 0.0, 1)
        rows[name] = {
            "identical": same_ids([*runs, *plain], [name, "plain"]),
            "tokens_per_second": tokens_per_second(runs),
            "acceptance_length": acceptance_length(runs),
        }
    return rows


def split_ms(bench: Bench) -> dict[str, Any]:
    """What the engine spends between target passes, per round; see docs/figures.md."""
    eight = [bench.prompts[i % len(bench.prompts)] for i in range(8)]

    def request(ids: tuple[int, ...], seed: int) -> None:
        bench.client.generate(ids=list(ids), max_tokens=SPLIT_TOKENS, temperature=0.8, seed=seed)

    def read(sessions: str, quantile: str) -> float:
        name = "outrider_verifier_split_ms"
        return round(bench.stack.metric("verifier", name, sessions=sessions, quantile=quantile), 3)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(request, eight, range(8)))
        for _ in range(SPLIT_ATTEMPTS):
            list(pool.map(request, eight, range(8)))
            with contextlib.suppress(KeyError):
                return {f"sessions_{n}": {"p50": read(n, "0.5"), "p99": read(n, "0.99")} for n in ("1", "8")}
    sys.exit(f"in {SPLIT_ATTEMPTS} attempts no step had eight sessions; run it on a quieter machine")


def alone(bench: Bench) -> dict[str, Any]:
    """Plain over the library's `generate`, each with every other process held."""
    ours, generate = bench.ours("plain"), bench.peers("hf_generate", 1)
    others = [*bench.stack.pids("drafter"), bench.peer.pid]

    def held(pids: list[int], arm: Arm) -> Arm:
        def run(ids: tuple[int, ...], temperature: float, seed: int) -> Run:
            bench.until_reachable()
            with stopped(pids):
                return arm(ids, temperature, seed)

        return run

    arms = {"plain": held(others, ours), "hf_generate": held(bench.stack.pids(), generate)}
    runs = bench.interleave(arms, 0.0, max(1, -(-10 // len(bench.prompts))))
    return {"plain_over_hf_generate_others_stopped": paired_ratio(runs, "plain", "hf_generate")}


def sampled_over_greedy(greedy: list[Run], sampled: list[Run]) -> dict[str, float | int]:
    """Speculative decoding at temperature 0.8 over greedy, prompt by prompt."""
    relabelled = [
        Run(arm, r.prompt, r.repeat, r.ids, r.seconds)
        for arm, runs in (("greedy", greedy), ("sampled", sampled))
        for r in runs
        if r.arm == "speculative"
    ]
    return paired_ratio(relabelled, "sampled", "greedy")


def all_cores(bench: Bench, cores: int) -> dict[str, Any]:
    """The peers' greedy rows with every core for torch."""
    arms = {arm: bench.peers(arm, cores) for arm in main_arms(bench) if arm in PEERS}
    bench.warm_up(arms.values())
    with stopped(bench.stack.pids()):
        runs = bench.interleave(arms, 0.0, 1)
    bench.until_reachable()
    rates = {arm: tokens_per_second(r for r in runs if r.arm == arm) for arm in arms}
    return {"threads": cores, "tokens_per_second": rates}


def measure(bench: Bench, cores: int) -> dict[str, Any]:
    """All fields of the result but the envelope."""
    arms = main_arms(bench)
    bench.warm_up(arms.values())
    both = interleave_temperatures(bench, arms)
    fields = section(both[0.0], greedy=True)
    fields["sampled"] = section(both[SAMPLED_TEMPERATURE], greedy=False)
    fields["sampled"]["over_greedy"] = sampled_over_greedy(both[0.0], both[SAMPLED_TEMPERATURE])
    fields["by_source"] = by_source(bench, [r for r in both[0.0] if r.arm == "plain"])
    fields["paired"] |= alone(bench)
    fields["hf_all_cores"] = all_cores(bench, cores)
    fields["split_ms"] = split_ms(bench)
    fields["peak_mb"] = bench.stack.peak_mb() | {"hf": peak_mb(bench.peer.pid)}
    fields["threads"] = {"verifier": 1, "drafter": 1, "orchestrator": 1, "hf": 1}
    return fields


def interleave_temperatures(bench: Bench, arms: dict[str, Arm]) -> dict[float, list[Run]]:
    """Greedy and sampled repeats in turn, so that neither has the quieter half of the run."""
    both: dict[float, list[Run]] = {0.0: [], SAMPLED_TEMPERATURE: []}
    for repeat in range(bench.settings.repeats):
        for temperature, runs in both.items():
            for run in bench.interleave(arms, temperature, 1):
                runs.append(Run(run.arm, run.prompt, repeat, run.ids, run.seconds, run.rounds, run.accepted))
    return both


def load_prompts(target: str, count: int) -> list[tuple[int, ...]]:
    """Ids of the first held-out prompts, as the target's tokenizer has them."""
    tokenizer = Tokenizer.from_file(str(Path(target) / "tokenizer.json"))
    lines = (REPOSITORY / "models" / "heldout.jsonl").read_text().splitlines()
    return [tuple(tokenizer.encode(json.loads(line)["prompt"]).ids) for line in lines[:count]]


def parse() -> argparse.Namespace:
    """Flags; the defaults are the figures of the README."""
    parser = argparse.ArgumentParser(prog="outrider bench offline", description=__doc__)
    parser.add_argument("--target", default=str(REPOSITORY / "models" / "target"))
    parser.add_argument("--drafter", default=str(REPOSITORY / "models" / "drafter"), help="a folder, or none")
    parser.add_argument("--prompts", type=int, default=8, help="held-out prompts")
    parser.add_argument("--tokens", type=int, default=128, help="max_tokens of each request")
    parser.add_argument("--repeats", type=int, default=3, help="of every arm on every prompt")
    parser.add_argument(
        "--json", action="store_true", help="accepted for symmetry; the last line is JSON anyway"
    )
    return parser.parse_args()


def main() -> None:
    """Start everything, measure, print."""
    settings = parse()
    started = time.perf_counter()
    cores = len(os.sched_getaffinity(0))
    drafter = None if settings.drafter == "none" else settings.drafter
    cold = {"OUTRIDER_VERIFIER__PREFIX_CACHE": "false"}  # prompts come again with every arm
    with Stack(settings.target, settings.drafter, **cold) as stack, Peer(settings.target, drafter) as peer:
        prompts = load_prompts(settings.target, settings.prompts)
        fields = measure(Bench(settings, stack, peer, prompts), cores)
    shown = {key: value for key, value in vars(settings).items() if key != "json"}
    print_result("offline", shown, started, fields)


if __name__ == "__main__":
    main()
