"""Measures one request at a time: plain and speculative decoding by the services beside that of transformers.

Run as `outrider bench offline --json`. docs/figures/offline.md says what each field means.
"""

import argparse
import concurrent.futures
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from benchmarks.shared.envelope import MODELS, command_line, print_result, settings_of
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
from benchmarks.shared.process_memory import peak_mb
from benchmarks.shared.round_profile import round_profile
from benchmarks.shared.services import HfPeer, UpServices, paused
from outrider.client import Client
from speculative.errors import Unavailable

Arm = Callable[[tuple[int, ...], float, int], TimedRun]
OURS = ("plain", "speculative")
"""Arms that the services decode."""
PEERS = {"hf_generate": "generate", "hf_assisted": "assisted", "hf_prompt_lookup": "prompt_lookup"}
SAMPLED_TEMPERATURE = 0.8
SPLIT_TOKENS = 96
"""Tokens per request; enough that eight requests that start together are all ready in most steps."""
SPLIT_ATTEMPTS = 30
"""Attempts at a step with eight sessions; on a busy machine some requests end before the last begins."""


class OfflineBench:
    """The arms over running services and one peer; each arm times one request."""

    def __init__(
        self, settings: argparse.Namespace, services: UpServices, peer: HfPeer, prompts: list[tuple[int, ...]]
    ) -> None:
        self.settings = settings
        self.services = services
        self.peer = peer
        self.prompts = prompts
        self.client = Client(services.address)

    def service_arm(self, arm: str, sources: tuple[str, ...] | None = None) -> Arm:
        """An arm through the services; the arm named "plain" decodes without speculation."""

        def run(ids: tuple[int, ...], temperature: float, seed: int) -> TimedRun:
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
            return TimedRun(arm, 0, 0, tuple(done.ids), seconds, done.usage.rounds, accepted)

        return run

    def peer_arm(self, arm: str, threads: int) -> Arm:
        """An arm of transformers with this many torch threads."""

        def run(ids: tuple[int, ...], temperature: float, seed: int) -> TimedRun:
            made, seconds = self.peer.decode(
                method=PEERS[arm],
                ids=list(ids),
                max_tokens=self.settings.tokens,
                temperature=temperature,
                seed=seed,
                threads=threads,
            )
            return TimedRun(arm, 0, 0, made, seconds)

        return run

    def interleave(self, arms: dict[str, Arm], temperature: float, repeats: int) -> list[TimedRun]:
        """Runs every arm on every prompt, `repeats` times; the order of the arms alternates (ABBA)."""
        runs = []
        orders = alternating_orders(arms)
        for repeat in range(repeats):
            for index, ids in enumerate(self.prompts):
                for name in next(orders):
                    run = arms[name](ids, temperature, 1000 + index)
                    runs.append(TimedRun(name, index, repeat, run.ids, run.seconds, run.rounds, run.accepted))
            print(f"temperature {temperature}: repeat {repeat + 1} of {repeats}", file=sys.stderr)
        return runs

    def until_reachable(self) -> None:
        """Waits until the orchestrator uses the verifier again after a pause."""
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
        """Runs each arm once, untimed."""
        for arm in arms:
            arm(self.prompts[0], 0.0, 0)


def main_arms(bench: OfflineBench) -> dict[str, Arm]:
    """The services' and the peer's arms by name, each with one torch thread."""
    peers = (
        PEERS if bench.settings.drafter != "none" else {k: v for k, v in PEERS.items() if k != "hf_assisted"}
    )
    return {arm: bench.service_arm(arm) for arm in OURS} | {arm: bench.peer_arm(arm, 1) for arm in peers}


def temperature_fields(runs: list[TimedRun], greedy: bool) -> dict[str, Any]:
    """The fields of one temperature."""
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


def by_source(bench: OfflineBench, plain: list[TimedRun]) -> dict[str, Any]:
    """Fields of greedy decoding with each source alone, its ids compared with plain decoding's."""
    names = bench.client.models()[0].sources
    rows = {}
    for name in names:
        runs = bench.interleave({name: bench.service_arm(name, (name,))}, 0.0, 1)
        rows[name] = {
            "identical": same_ids([*runs, *plain], [name, "plain"]),
            "tokens_per_second": tokens_per_second(runs),
            "acceptance_length": acceptance_length(runs),
        }
    return rows


def profiles(bench: OfflineBench) -> dict[str, Any]:
    """Where the verifier's time of a step goes, by temperature and by arm of ours."""
    return {
        mode: {
            name: round_profile(
                bench.services, partial(bench.interleave, {name: bench.service_arm(name)}, temperature, 1)
            )
            for name in OURS
        }
        for mode, temperature in (("greedy", 0.0), ("sampled", SAMPLED_TEMPERATURE))
    }


def split_ms(bench: OfflineBench) -> dict[str, Any]:
    """Milliseconds that the engine spends per round between target passes; see docs/figures/offline.md."""
    eight = [bench.prompts[i % len(bench.prompts)] for i in range(8)]

    def request(ids: tuple[int, ...], seed: int) -> None:
        # A request that ends early leaves fewer than eight in the steps.
        bench.client.generate(
            ids=list(ids), max_tokens=SPLIT_TOKENS, temperature=0.8, seed=seed, ignore_eos=True
        )

    def read(sessions: str, quantile: str) -> float:
        name = "outrider_verifier_split_ms"
        return round(bench.services.metric("verifier", name, sessions=sessions, quantile=quantile), 3)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(request, eight, range(8)))
        for _ in range(SPLIT_ATTEMPTS):
            list(pool.map(request, eight, range(8)))
            with contextlib.suppress(KeyError):
                return {f"sessions_{n}": {"p50": read(n, "0.5"), "p99": read(n, "0.99")} for n in ("1", "8")}
    sys.exit(f"in {SPLIT_ATTEMPTS} attempts no step had eight sessions; run it on a quieter machine")


def ratio_with_others_paused(bench: OfflineBench) -> dict[str, Any]:
    """Rate of plain decoding over transformers' `generate`, each with every other process paused."""
    ours, generate = bench.service_arm("plain"), bench.peer_arm("hf_generate", 1)
    others = [*bench.services.pids("drafter"), bench.peer.pid]

    def with_paused(pids: list[int], arm: Arm) -> Arm:
        def run(ids: tuple[int, ...], temperature: float, seed: int) -> TimedRun:
            bench.until_reachable()
            with paused(pids):
                return arm(ids, temperature, seed)

        return run

    arms = {"plain": with_paused(others, ours), "hf_generate": with_paused(bench.services.pids(), generate)}
    runs = bench.interleave(arms, 0.0, max(1, -(-10 // len(bench.prompts))))
    return {"plain_over_hf_generate_others_stopped": paired_ratio(runs, "plain", "hf_generate")}


def sampled_over_greedy(greedy: list[TimedRun], sampled: list[TimedRun]) -> dict[str, float | int]:
    """Rate of speculative decoding at temperature 0.8 over greedy, prompt by prompt."""
    relabelled = [
        TimedRun(arm, r.prompt, r.repeat, r.ids, r.seconds)
        for arm, runs in (("greedy", greedy), ("sampled", sampled))
        for r in runs
        if r.arm == "speculative"
    ]
    return paired_ratio(relabelled, "sampled", "greedy")


def all_cores(bench: OfflineBench, cores: int) -> dict[str, Any]:
    """Tokens/s of the peer's greedy arms with `cores` torch threads."""
    arms = {arm: bench.peer_arm(arm, cores) for arm in main_arms(bench) if arm in PEERS}
    bench.warm_up(arms.values())
    with paused(bench.services.pids()):
        runs = bench.interleave(arms, 0.0, 1)
    bench.until_reachable()
    rates = {arm: tokens_per_second(r for r in runs if r.arm == arm) for arm in arms}
    return {"threads": cores, "tokens_per_second": rates}


def measure(bench: OfflineBench, cores: int) -> dict[str, Any]:
    """All fields of the result except the envelope's."""
    arms = main_arms(bench)
    bench.warm_up(arms.values())
    both = interleave_temperatures(bench, arms)
    fields = temperature_fields(both[0.0], greedy=True)
    fields["sampled"] = temperature_fields(both[SAMPLED_TEMPERATURE], greedy=False)
    fields["sampled"]["over_greedy"] = sampled_over_greedy(both[0.0], both[SAMPLED_TEMPERATURE])
    fields["by_source"] = by_source(bench, [r for r in both[0.0] if r.arm == "plain"])
    fields["profile"] = profiles(bench)
    fields["paired"] |= ratio_with_others_paused(bench)
    fields["hf_all_cores"] = all_cores(bench, cores)
    fields["split_ms"] = split_ms(bench)
    fields["peak_mb"] = bench.services.peak_mb() | {"hf": peak_mb(bench.peer.pid)}
    fields["threads"] = {"verifier": 1, "drafter": 1, "orchestrator": 1, "hf": 1}
    return fields


def interleave_temperatures(bench: OfflineBench, arms: dict[str, Arm]) -> dict[float, list[TimedRun]]:
    """Runs by temperature; greedy and sampled repeats alternate, so that neither gets the quieter half."""
    both: dict[float, list[TimedRun]] = {0.0: [], SAMPLED_TEMPERATURE: []}
    for repeat in range(bench.settings.repeats):
        for temperature, runs in both.items():
            for run in bench.interleave(arms, temperature, 1):
                runs.append(
                    TimedRun(run.arm, run.prompt, repeat, run.ids, run.seconds, run.rounds, run.accepted)
                )
    return both


def parse() -> argparse.Namespace:
    """Parses the flags; the figures in the README have the default flags."""
    parser = command_line("offline", __doc__)
    parser.add_argument("--target", default=str(MODELS / "target"), help="folder of the target model")
    parser.add_argument("--drafter", default=str(MODELS / "drafter"), help="folder of the drafter, or none")
    parser.add_argument(
        "--heads", default="", help="heads of the target that draft as well, as `outrider up --heads` says"
    )
    parser.add_argument("--prompts", type=int, default=8, help="number of held-out prompts")
    parser.add_argument("--passes", default="eager", help="our passes, as `outrider up --passes` says")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each request")
    parser.add_argument("--repeats", type=int, default=3, help="repeats of every arm on every prompt")
    return parser.parse_args()


def main() -> None:
    """Starts the services, measures and prints the result."""
    settings = parse()
    started = time.perf_counter()
    cores = len(os.sched_getaffinity(0))
    drafter = None if settings.drafter == "none" else settings.drafter
    variables = {
        "OUTRIDER_VERIFIER__PREFIX_CACHE": "false",  # every arm repeats the prompts
        "OUTRIDER_UP__HEADS": settings.heads,
    }
    with (
        UpServices(settings.target, settings.drafter, passes=settings.passes, **variables) as services,
        HfPeer(settings.target, drafter) as peer,
    ):
        prompts = load_prompts(settings.target, settings.prompts)
        fields = measure(OfflineBench(settings, services, peer, prompts), cores)
    print_result("offline", settings_of(settings), started, fields)


if __name__ == "__main__":
    main()
