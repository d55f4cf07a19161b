"""Measures the embedded pair beside transformers and llama.cpp on the same cores.

Run as `outrider bench peers --json`. docs/figures/peers.md says what each field means.
"""

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.peers.arms import HF_METHODS, Decode, Prompts, hf_arm, llama_arm, outrider_arm
from benchmarks.peers.llama_files import BFLOAT16, require_gguf, stored_in_bfloat16, target_files
from benchmarks.peers.llama_server import PROGRAM, LlamaServer, find_program, version_of
from benchmarks.peers.peer_figures import (
    GENERATE,
    LLAMA,
    PLAIN,
    SPECULATIVE,
    Runs,
    Setting,
    acceptance,
    best_over_llama,
    identical,
    ids_equal_generate,
    over_generate,
    plain_over_llama,
    rates,
)
from benchmarks.shared.envelope import MODELS, command_line, print_result, settings_of
from benchmarks.shared.figures import TimedRun, alternating_orders
from benchmarks.shared.heldout import load_prompts
from benchmarks.shared.services import HfPeer, UpServices

TEMPERATURES = (0.0, 0.8)
COLD = {"OUTRIDER_VERIFIER__PREFIX_CACHE": "false"}  # every arm repeats the prompts
SEED = 1000
LLAMA_FLAGS = ("--flash-attn", "off", "--cache-type-k", "f32", "--cache-type-v", "f32", "--cache-ram", "0")
"""Flags of all of llama.cpp's servers: keys and values in float32 as ours, no prompt reused."""
LLAMA_SPECULATION: Mapping[str, tuple[str, ...]] = {
    "plain": (),
    "draft": ("--spec-type", "draft-simple", "--spec-draft-n-max", "5", "--spec-draft-p-min", "0.6"),
    "ngram": (
        "--spec-type",
        "ngram-map-k",
        "--spec-ngram-map-k-size-n",
        "3",
        "--spec-ngram-map-k-size-m",
        "8",
    ),
}
"""Flags of llama.cpp's arms; see docs/figures/peers.md."""
LEFT_OUT: Mapping[str, str] = {
    "arctic-inference": "it drafts only inside vLLM; `bench retrieval` has its suffix cache beside ours",
    "vLLM": "start its server, and name it to `outrider bench compare --endpoint`; it wants a GPU",
    "SGLang": "start its server, and name it to `outrider bench compare --endpoint`; it wants a GPU",
}
"""Peers that are no arm here, and why."""
NO_LLAMA = {"llama.cpp": f"{PROGRAM} is not on PATH; --llama-server names it"}


class PeersBench:
    """The arms by number of threads, each over running processes, and the prompts."""

    def __init__(self, settings: argparse.Namespace, arms: dict[int, dict[str, Decode]]) -> None:
        self.settings = settings
        self.arms = arms
        self.prompts = load_prompts(settings.target, settings.prompts)
        self.repeats = 0
        """Repeats that were measured so far."""

    def measure(self) -> dict[Setting, list[TimedRun]]:
        """Times every arm under every setting; settings and arms take turns.

        Ends after `--repeats` repeats, or sooner where one more would take longer than `--seconds` allow.
        """
        runs: dict[Setting, list[TimedRun]] = {at: [] for at in self._settings()}
        started = time.perf_counter()
        while self.repeats < self.settings.repeats:
            for at, done in runs.items():
                done += self._repeat(at, self.repeats)
            self.repeats += 1
            spent = time.perf_counter() - started
            print(f"repeat {self.repeats} of {self.settings.repeats} at {spent:.0f} s", file=sys.stderr)
            if spent * (1 + 1 / self.repeats) > self.settings.seconds:
                break
        return runs

    def warm_up(self) -> None:
        """Runs each arm once, and our speculation `--warm-up` times in each setting, untimed.

        What a source gains and costs is learnt from requests, and a service serves more than a handful.
        """
        for threads in self.settings.threads:
            for arm, decode in self._arms(threads, 1).items():
                self._run(arm, decode, self.prompts[:1], 0.0, 0, 0)
        for at in self._settings() * self.settings.warm_up:
            decode = self.arms[at.threads][SPECULATIVE]
            for batch, prompts in enumerate(self._batches(at.streams)):
                self._run(SPECULATIVE, decode, prompts, at.temperature, batch, 0)

    def _settings(self) -> list[Setting]:
        """All settings, in the order in which they take turns."""
        return [
            Setting(temperature, streams, threads)
            for streams in self.settings.streams
            for temperature in TEMPERATURES
            for threads in self.settings.threads
        ]

    def _batches(self, streams: int) -> list[Prompts]:
        """The prompts in batches of so many streams."""
        return [self.prompts[at : at + streams] for at in range(0, len(self.prompts), streams)]

    def _arms(self, threads: int, streams: int) -> dict[str, Decode]:
        """The arms of a setting; transformers speculates for one prompt at a time only."""
        arms = self.arms[threads]
        alone = set(HF_METHODS) - {GENERATE}
        return arms if streams == 1 else {arm: decode for arm, decode in arms.items() if arm not in alone}

    def _repeat(self, at: Setting, repeat: int) -> Iterator[TimedRun]:
        arms = self._arms(at.threads, at.streams)
        orders = alternating_orders(arms)
        if repeat % 2:
            next(orders)
        for batch, prompts in enumerate(self._batches(at.streams)):
            for arm in next(orders):
                yield self._run(arm, arms[arm], prompts, at.temperature, batch, repeat)

    def _run(
        self, arm: str, decode: Decode, prompts: Prompts, temperature: float, batch: int, repeat: int
    ) -> TimedRun:
        done = decode(prompts, temperature, SEED + batch * len(prompts))
        if any(len(ids) != self.settings.tokens for ids in done.ids):
            lengths = [len(ids) for ids in done.ids]
            raise SystemExit(f"{arm}: {lengths} tokens came in place of {self.settings.tokens} each")
        ids = tuple(id_ for stream in done.ids for id_ in stream)
        return TimedRun(arm, batch, repeat, ids, done.seconds, done.rounds)


@contextlib.contextmanager
def running(settings: argparse.Namespace, program: str | None) -> Iterator[dict[int, dict[str, Decode]]]:
    """Every arm over its running processes, by threads and name."""
    arms: dict[int, dict[str, Decode]] = {threads: {} for threads in settings.threads}
    with contextlib.ExitStack() as held:
        peer = held.enter_context(HfPeer(settings.target, settings.drafter, ignore_eos=True))
        for threads, own in arms.items():
            services = held.enter_context(
                UpServices(
                    settings.target,
                    settings.drafter,
                    threads=threads,
                    passes=settings.passes,
                    **COLD | {"OUTRIDER_UP__HEADS": settings.heads},
                )
            )
            own[PLAIN] = outrider_arm(services.address, False, settings.tokens)
            own[SPECULATIVE] = outrider_arm(services.address, True, settings.tokens)
            for arm in HF_METHODS:
                own[arm] = hf_arm(peer, arm, threads, settings.tokens)
        if program is not None:
            servers = held.enter_context(llama_servers(settings, program))
            for (name, threads), server in servers.items():
                arms[threads][LLAMA + name] = llama_arm(server, settings.tokens)
        yield arms


def llama_flags(target: str) -> dict[str, tuple[str, ...]]:
    """The flags of llama.cpp's arms by name, with those over bfloat16 only where no weight is rounded."""
    smaller = ("plain", "ngram") if stored_in_bfloat16(target) else ()
    return {**LLAMA_SPECULATION, **{f"{name}{BFLOAT16}": LLAMA_SPECULATION[name] for name in smaller}}


@contextlib.contextmanager
def llama_servers(settings: argparse.Namespace, program: str) -> Iterator[dict[tuple[str, int], LlamaServer]]:
    """Servers of llama.cpp by arm and threads, over converted copies of the models."""
    from benchmarks.peers.gguf_models import write_gguf

    with contextlib.ExitStack() as held:
        files = held.enter_context(target_files(settings.target))
        folder = held.enter_context(tempfile.TemporaryDirectory(prefix="outrider-peers-"))
        drafter = Path(folder) / "drafter.gguf"
        write_gguf(Path(settings.drafter), drafter)
        servers = {}
        for threads in settings.threads:
            for name, own in llama_flags(settings.target).items():
                flags = [*LLAMA_FLAGS, *own, *(("--model-draft", str(drafter)) if name == "draft" else ())]
                model = files[BFLOAT16 if name.endswith(BFLOAT16) else ""]
                servers[name, threads] = held.enter_context(
                    LlamaServer(program, model, max(settings.streams), threads, flags)
                )
        for server in servers.values():
            server.wait_ready()
        yield servers


def fields_of(runs: Runs, with_llama: bool) -> dict[str, Any]:
    """The result's fields about the runs."""
    greedy, sampled = TEMPERATURES
    equal = ids_equal_generate(runs)
    fields = {
        "identical": identical(runs, greedy, [PLAIN, SPECULATIVE]) and equal[PLAIN] == 1.0,
        "sampled_identical": identical(runs, sampled, [PLAIN, SPECULATIVE]),
        "ids_equal_generate": equal,
        "acceptance_length": acceptance(runs),
        "tokens_per_second": rates(runs),
        "over_generate": over_generate(runs),
    }
    if with_llama:
        fields |= {
            "plain_over_llama": plain_over_llama(runs),
            "speculative_over_llama_best": best_over_llama(runs),
        }
    return fields


def threads_by_process(threads: list[int], with_llama: bool) -> dict[str, Any]:
    """Compute threads of each process, by the number of threads that a row names."""
    return {
        str(count): {"verifier": count, "drafter": count, "orchestrator": 1, "hf": count}
        | ({PROGRAM: count} if with_llama else {})
        for count in threads
    }


def parse() -> argparse.Namespace:
    """Parses the flags; the figures in the docs have the default flags."""

    def numbers(text: str) -> list[int]:
        return [int(number) for number in text.split(",")]

    parser = command_line("peers", __doc__, is_curve=True)
    parser.add_argument("--target", default=str(MODELS / "target"), help="folder of the target model")
    parser.add_argument("--drafter", default=str(MODELS / "drafter"), help="folder of the drafter")
    parser.add_argument(
        "--heads", default="", help="heads of our target that draft as well, as `outrider up --heads` says"
    )
    parser.add_argument(
        "--llama-server", metavar="PATH", help="llama.cpp's server; default: the one on PATH, if any"
    )
    parser.add_argument("--passes", default="compiled", help="our passes, as `outrider up --passes` says")
    parser.add_argument("--threads", type=numbers, default=[1, 2], help="compute threads, comma-separated")
    parser.add_argument("--streams", type=numbers, default=[1, 8], help="streams at once, comma-separated")
    parser.add_argument("--cores", type=int, default=2, help="cores that all processes share")
    parser.add_argument("--prompts", type=int, default=8, help="number of held-out prompts")
    parser.add_argument("--tokens", type=int, default=96, help="tokens of each request")
    parser.add_argument(
        "--repeats", type=int, default=3, help="the most repeats of every arm on every prompt"
    )
    parser.add_argument(
        "--warm-up", type=int, default=2, help="untimed runs of our speculation on every prompt, per setting"
    )
    parser.add_argument(
        "--seconds", type=float, default=500, help="start no repeat that ends later than this"
    )
    parser.add_argument("--quick", action="store_true", help="one repeat of 64 tokens, no warm-up")
    settings = parser.parse_args()
    if any(settings.prompts % streams for streams in settings.streams) or 1 not in settings.streams:
        parser.error("--streams must hold 1, and each number must divide --prompts")
    if settings.quick:
        settings.repeats, settings.tokens, settings.warm_up = 1, 64, 0
    return settings


def main() -> None:
    """Starts all processes on the same cores, measures and prints the result."""
    settings = parse()
    started = time.perf_counter()
    program = find_program(settings.llama_server)
    if program is not None:
        require_gguf(program)
    cores = sorted(os.sched_getaffinity(0))[: settings.cores]
    os.sched_setaffinity(0, cores)  # the processes started below inherit it
    left_out = {**LEFT_OUT, **(NO_LLAMA if program is None else {})}
    for peer, why in left_out.items():
        print(f"without {peer}: {why}", file=sys.stderr)
    with running(settings, program) as arms:
        bench = PeersBench(settings, arms)
        bench.warm_up()
        runs = bench.measure()
    fields = fields_of(runs, program is not None)
    fields["repeats"] = bench.repeats
    fields["threads"] = threads_by_process(settings.threads, program is not None)
    fields["cores"] = len(cores)
    fields["llama_server"] = None if program is None else llama_fields(program, settings.target)
    fields["left_out"] = left_out
    print_result("peers", settings_of(settings, "quick", "llama_server"), started, fields, settings.plot)


def llama_fields(program: str, target: str) -> dict[str, Any]:
    """The version of llama.cpp's server, and the flags of its arms."""
    flags = {LLAMA + arm: " ".join([*LLAMA_FLAGS, *own]) for arm, own in llama_flags(target).items()}
    return {"version": version_of(program), "flags": flags}


if __name__ == "__main__":
    main()
