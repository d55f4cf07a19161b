"""Measures what each way to run a device's model costs per drafted token, and how often its drafts are right.

The target's plain answers are decoded first. Then the device drafts along them, as it would in a request.
Run as `outrider bench edge-drafting --json`. docs/figures/edge_drafting.md says what each field means.
"""

import argparse
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.edge.arms import ModelShare
from benchmarks.peers.gguf_models import write_gguf
from benchmarks.peers.llama_server import LlamaServer, find_program, version_of
from benchmarks.shared.envelope import add_pair, command_line, print_result, settings_of
from benchmarks.shared.figures import alternating_orders
from benchmarks.shared.heldout import load_prompts
from benchmarks.shared.services import UpServices
from outrider.client import Client
from outrider.edge.backends import DraftModel, open_model
from outrider.edge.controller import WINDOW, Decision
from outrider.edge.device_session import DeviceSession, Terms
from outrider.edge.edge_drafter import EdgeDrafter
from outrider.edge.latency_model import Mode
from speculative.params import SamplingParams

TEMPERATURES = (0.0, 0.8)
QUANTISED = ("q8_0", "q4_0")
"""llama.cpp's formats of 8 and 4 bits a weight, beside float32."""
COLD: dict[str, Any] = {"OUTRIDER_VERIFIER__PREFIX_CACHE": "false"}
SERVER_FLAGS = ("--ctx-size", "2048", "--cache-ram", "0")
PLENTY = 1 << 30
"""Credits: a replay is not to end for want of credits."""


@dataclass(frozen=True, slots=True)
class PlainAnswer:
    """An answer of the target that no source drafted for."""

    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    seed: int
    temperature: float


@dataclass(slots=True)
class Replayed:
    """What drafting along answers took, and how it came out."""

    token_ms: list[float] = field(default_factory=list)
    """Milliseconds of each drafted token for which the model read one or two ids."""
    prompt_ms: list[float] = field(default_factory=list)
    """Milliseconds of each prompt, its first drafted token included."""
    equal: int = 0
    wrong: int = 0
    committed: int = 0
    windows: int = 0


def plain_answers(
    services: UpServices, prompts: Sequence[Sequence[int]], tokens: int
) -> tuple[list[PlainAnswer], float]:
    """The target's answers at each temperature, and the median of its milliseconds per token."""
    answers, paces = [], []
    with Client(services.address) as client:
        for temperature in TEMPERATURES:
            for seed, prompt in enumerate(prompts):
                began = time.perf_counter()
                completion = client.generate(
                    ids=prompt,
                    max_tokens=tokens,
                    temperature=temperature,
                    seed=seed,
                    ignore_eos=True,
                    speculation=False,
                )
                paces.append(1000 * (time.perf_counter() - began) / tokens)
                answers.append(PlainAnswer(tuple(prompt), completion.ids, seed, temperature))
    return answers, median(paces)


def replay(model: DraftModel, answer: PlainAnswer, width: int, into: Replayed) -> None:
    """Drafts windows along an answer: behind each, the target's own id follows the drafts that are right."""
    terms = Terms(
        ids=answer.prompt,
        prompt_length=len(answer.prompt),
        seed=answer.seed,
        epoch=1,
        params=SamplingParams(temperature=answer.temperature),
        vocabulary_size=width,
        limit=len(answer.prompt) + len(answer.ids),
        credits=PLENTY,
        credits_per_token=0,
    )
    model.rewind(0)
    session = DeviceSession(terms, Decision(Mode.PIPELINED, WINDOW, 1, 0, "replay"))
    left = answer.ids
    while left:
        _draft_window(model, session, into)
        window = session.take_window()
        drafted = () if window is None else window.tokens
        pairs = enumerate(zip(drafted, left, strict=False))
        right = next((at for at, (ours, theirs) in pairs if ours != theirs), len(drafted))
        session.commit(session.length, left[: right + 1])
        left = left[right + 1 :]
        into.windows += 1
    into.equal += session.counts.equal
    into.wrong += session.counts.wrong
    into.committed += len(answer.ids)


def _draft_window(model: DraftModel, session: DeviceSession, into: Replayed) -> None:
    while (reading := session.plan()) is not None:
        is_prompt = not session.read
        began = time.perf_counter()
        if reading.keep < len(session.read):
            model.rewind(reading.keep)
        session.drafted(reading, model.forward(reading.ids))
        took_ms = 1000 * (time.perf_counter() - began)
        if is_prompt:
            into.prompt_ms.append(took_ms)
        elif len(reading.ids) <= 2:
            into.token_ms.append(took_ms)


def figures_of(runs: Sequence[Replayed], size_mb: float) -> dict[str, Any]:
    """An arm's figures; lists have an entry for each temperature."""
    return {
        "file_mb": round(size_mb, 2),
        "draft_ms": [round(median(run.token_ms), 3) for run in runs],
        "prompt_ms": [round(median(run.prompt_ms), 2) for run in runs],
        "acceptance": [round(run.equal / (run.equal + run.wrong), 3) for run in runs],
        "tokens_per_pass": [round(run.committed / run.windows, 3) for run in runs],
    }


@dataclass(slots=True)
class Arms:
    """The models by arm, with the sizes of their files in MB, and the reasons why arms are missing."""

    models: dict[str, DraftModel] = field(default_factory=dict)
    sizes: dict[str, float] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def add(self, held: ExitStack, arm: str, place: str, file: Path) -> None:
        """Opens a model; `held` closes it."""
        self.models[arm] = model = open_model(place, file if place.startswith("http") else None)
        held.callback(model.close)
        self.sizes[arm] = file.stat().st_size / 1e6


def open_arms(held: ExitStack, flags: argparse.Namespace, folder: Path) -> Arms:
    """Every way to run the drafter that this machine has programs and packages for."""
    arms = Arms()
    arms.add(held, "torch", flags.drafter, next(Path(flags.drafter).glob("*.safetensors")))
    files = {"f32": folder / "f32.gguf"}
    write_gguf(Path(flags.drafter), files["f32"])
    server = find_program(flags.llama_server)
    quantise = _beside(server, "llama-quantize")
    if quantise is None:
        arms.missing["q8_0, q4_0"] = "there is no llama-quantize beside llama-server or on PATH"
    for kind in QUANTISED if quantise is not None else ():
        files[kind] = folder / f"{kind}.gguf"
        command = [str(quantise), str(files["f32"]), str(files[kind]), kind]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    if importlib.util.find_spec("llama_cpp") is None:
        arms.missing["llama.cpp"] = "llama-cpp-python is not installed"
    else:
        for kind, file in files.items():
            arms.add(held, f"llama.cpp {kind}", str(file), file)
    if server is None:
        arms.missing["llama-server"] = "there is no llama-server on PATH; give --llama-server"
    for kind, file in files.items() if server is not None else ():
        running = held.enter_context(LlamaServer(str(server), file, 1, 1, SERVER_FLAGS))
        running.wait_ready()
        arms.add(held, f"llama-server {kind}", running.url, file)
    return arms


def is_identical(address: str, model: DraftModel, answers: Sequence[PlainAnswer]) -> bool:
    """Whether real requests that a model drafts for have the ids of these plain answers."""
    with EdgeDrafter(address, ModelShare(model, []), mode=Mode.PIPELINED) as drafter:
        return all(
            answer.ids
            == drafter.generate(
                ids=answer.prompt,
                max_tokens=len(answer.ids),
                temperature=answer.temperature,
                seed=answer.seed,
                ignore_eos=True,
                sources=["edge"],
            ).ids
            for answer in answers
        )


def _beside(program: str | None, name: str) -> str | None:
    """A program in the folder of another one, or on PATH; None where there is none."""
    beside = None if program is None else shutil.which(name, path=str(Path(program).resolve().parent))
    return beside or shutil.which(name)


def measure(arms: Arms, answers: Sequence[PlainAnswer], width: int) -> dict[str, Any]:
    """The figures of all arms, which take turns on each answer."""
    runs = {arm: {temperature: Replayed() for temperature in TEMPERATURES} for arm in arms.models}
    for answer, order in zip(answers, alternating_orders(tuple(arms.models)), strict=False):
        for arm in order:
            replay(arms.models[arm], answer, width, runs[arm][answer.temperature])
    return {arm: figures_of(tuple(found.values()), arms.sizes[arm]) for arm, found in runs.items()}


def _package_version() -> str | None:
    try:
        return importlib.metadata.version("llama-cpp-python")
    except importlib.metadata.PackageNotFoundError:
        return None


def main() -> None:
    """Runs the benchmark and prints its result."""
    parser = command_line("edge-drafting", __doc__)
    add_pair(parser)
    parser.add_argument(
        "--llama-server",
        metavar="PATH",
        help="llama.cpp's server; default: the one on PATH, if any. llama-quantize is searched beside it",
    )
    parser.add_argument("--prompts", type=int, default=4, help="held-out prompts; default 4")
    parser.add_argument("--tokens", type=int, default=96, help="tokens of each answer; default 96")
    flags = parser.parse_args()
    started = time.perf_counter()
    os.environ["OMP_NUM_THREADS"] = "1"  # torch and llama-server get one thread, too
    with UpServices(flags.target, "none", **COLD) as services, ExitStack() as held:
        prompts = load_prompts(flags.target, flags.prompts)
        answers, target_ms = plain_answers(services, prompts, flags.tokens)
        folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
        with Client(services.address) as client:
            width = client.models()[0].vocabulary_size
        arms = open_arms(held, flags, folder)
        digests = {model.digest() for model in arms.models.values()}
        print(f"arms: {', '.join(arms.models)}; missing: {arms.missing or 'none'}", file=sys.stderr)
        by_arm = measure(arms, answers, width)
        some = [next(one for one in answers if one.temperature == at) for at in TEMPERATURES]
        identical = all([is_identical(services.address, model, some) for model in arms.models.values()])
        program = find_program(flags.llama_server)
    fields = {
        "temperatures": list(TEMPERATURES),
        "target_ms": round(target_ms, 2),
        "same_vocabulary": len(digests) == 1,
        "identical": identical,
        "arms": by_arm,
        "missing": arms.missing,
        "llama_server": None if program is None else version_of(program),
        "llama_cpp_python": _package_version(),
    }
    print_result("edge-drafting", settings_of(flags), started, fields)


if __name__ == "__main__":
    main()
