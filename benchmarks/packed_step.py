"""Milliseconds of one packed pass beside transformers' own cached forward, llama.cpp's, and the floor.

The floor is the time in which the machine reads the weights once. Run as `outrider bench packed_step --json`,
on a random-weight Llama, or with `--model` on any model; llama.cpp needs `--model` and its `llama-bench`.
Cases take turns and medians are reported, so the ratios hold on a busy machine; passes of llama.cpp are timed
before ours and after them. docs/figures/packed_step.md says what each field means.
"""

import argparse
import contextlib
import copy
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks.peers.llama_bench import PROGRAM, pass_times
from benchmarks.peers.llama_files import BFLOAT16, require_gguf, target_files
from benchmarks.peers.llama_server import find_program
from benchmarks.shared.bandwidth import cache_bytes, read_seconds
from benchmarks.shared.envelope import command_line, print_result, settings_of
from outrider.lm.autotune.products import TunedProduct
from outrider.lm.autotune.threads import PassThreads
from outrider.lm.compiled.panels import smallest_panels
from outrider.lm.linear import PackedLinear
from outrider.lm.load.check import Trial
from outrider.lm.plan import SequenceRows
from outrider.lm.runner import PackedLM

CONTEXT = 256
"""Tokens in the cache before a timed pass."""
ROWS = (1, 2, 4, 8, 16, 32, 64)
"""Rows of the cases with one session, packed and computed by transformers and llama.cpp."""
SHAPES = ((2, 1), (2, 8), (4, 1), (4, 8), (8, 1), (8, 4), (8, 8))
"""(sessions, rows each) of the packed cases with several sessions."""
FROM_MEMORY = 8
"""Size of the buffer that is read from memory, in last-level caches."""
SMALL_LAYERS, SMALL_WIDTH = 4, 64
SMALL_SHAPES = ((1, 1), (1, 17), (8, 17))
"""(sessions, rows each) of the small model's cases."""
WARM_UP = 3
LLAMA = "llama"
"""Beginning of the names of llama.cpp's cases."""
BUSY_CASES = ("compiled_1x1", "compiled_1x4", "compiled_1x8")
"""Cases that are timed again beside busy processes."""
BUSY_REPEATS = 10
"""How many times `--repeats` these cases are repeated: slow passes are rare."""

Case = Callable[[], float]
"""Runs one repeat and returns its milliseconds."""


def build(layers: int, width: int = 256) -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    """Two copies of one model: the packed pass changes the first, transformers runs the second."""
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=width,
        intermediate_size=width * 43 // 16,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
    )
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    ours = LlamaForCausalLM(copy.deepcopy(config)).eval()
    theirs = LlamaForCausalLM(config).eval()
    theirs.load_state_dict(ours.state_dict())
    return ours.requires_grad_(False), theirs.requires_grad_(False)


def random_pair(layers: int, width: int = 256) -> tuple[PackedLM, LlamaForCausalLM]:
    """A random-weight Llama, packed and as transformers has it."""
    ours, theirs = build(layers, width)
    lm = PackedLM(ours)
    lm.trial = Trial.of(lm)
    lm.pack()
    return lm, theirs


def compiled_twin(settings: argparse.Namespace, eager: Case) -> tuple[PackedLM, dict[str, float]]:
    """The same model with compiled passes, and how long compiling took while `eager` passes went on."""
    if settings.model:
        lm = PackedLM.load(settings.model, threads=settings.threads)
    else:
        lm, _ = random_pair(settings.layers)
    alone_ms = statistics.median(eager() for _ in range(settings.repeats))
    lm.compile_passes("auto")
    beside_ms = []
    while lm.compiler is not None and not lm.compiler.is_done:
        beside_ms.append(eager())
    lm.take_compiled()
    if lm.compiler is None or lm.compiled is None:
        raise SystemExit("passes cannot be compiled here; the warning above says why")
    lm.compiled.threads = PassThreads(settings.threads)  # for passes of any number of rows
    figures = {
        "seconds": round(lm.compiler.seconds, 1),
        "eager_ms": round(alone_ms, 3),
        "eager_ms_meanwhile": round(statistics.median(beside_ms), 3),
        "lost_ms": round(sum(beside_ms) - alone_ms * len(beside_ms), 1),
    }
    return lm, figures


def transformers_pass(model: PreTrainedModel, rows: int) -> Case:
    """A case of transformers' forward of `rows` tokens after the context; the cache is cropped back."""
    cache = DynamicCache(config=model.config)
    step = torch.arange(rows)[None]
    with torch.inference_mode():
        model(torch.arange(CONTEXT)[None], past_key_values=cache)

    def once() -> float:
        with torch.inference_mode():
            started = time.perf_counter()
            model(step, past_key_values=cache, use_cache=True, logits_to_keep=rows)
            spent = time.perf_counter() - started
            cache.crop(-rows)
        return spent * 1e3

    return once


def packed_pass(lm: PackedLM, sessions: int, rows: int) -> Case:
    """A case of a packed pass: per session the last token and a binary tree of `rows - 1` nodes below it."""
    tables = [lm.table(reserve=CONTEXT + rows) for _ in range(sessions)]
    for table in tables:
        lm.forward([SequenceRows(table, range(CONTEXT), range(-1, CONTEXT - 1), ())])
        table.commit(range(CONTEXT))
    parents = [(row + 1) // 2 - 1 for row in range(rows)]

    def once() -> float:
        started = time.perf_counter()
        lm.forward([SequenceRows(table, range(rows), parents, range(rows)) for table in tables])
        spent = time.perf_counter() - started
        for table in tables:
            table.drop_nodes()
        return spent * 1e3

    return once


def overhead(lm: PackedLM, packed: Case) -> Case:
    """A case of what `forward` takes beyond its call of the model, in passes of one shape."""
    own, inside = lm.model.forward, [0.0]

    def timed(*given: Any, **named: Any) -> Any:
        started = time.perf_counter()
        try:
            return own(*given, **named)
        finally:
            inside[0] = (time.perf_counter() - started) * 1e3

    def once() -> float:
        lm.model.forward = timed
        try:
            return packed() - inside[0]
        finally:
            lm.model.forward = own

    return once


def small_cases() -> dict[str, Case]:
    """Cases of a small model, mostly Python: whole passes, and what passes take beyond the model's call."""
    lm, theirs = random_pair(SMALL_LAYERS, SMALL_WIDTH)
    cases = {f"own_{rows}": transformers_pass(theirs, rows) for rows in (1, 17)}
    for sessions, rows in SMALL_SHAPES:
        packed = packed_pass(lm, sessions, rows)
        cases[f"packed_{sessions}x{rows}"] = packed
        cases[f"overhead_{sessions}x{rows}"] = overhead(lm, packed)
    return cases


def measure(cases: dict[str, Case], repeats: int) -> dict[str, float]:
    """Median milliseconds of each case by name; the cases take turns."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(repeats + WARM_UP):
        for name, once in cases.items():
            spent = once()
            if turn >= WARM_UP:
                times[name].append(spent)
    return {name: round(statistics.median(spent), 3) for name, spent in times.items()}


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Processes that use all the time that they get."""
    with contextlib.ExitStack() as held:
        for _ in range(count):
            process = held.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            held.callback(process.kill)
        yield


def beside_busy(cases: dict[str, Case], count: int, repeats: int) -> dict[str, dict[str, float]]:
    """Mean and 99th percentile of each case in ms, one case after the other, beside busy processes."""
    figures = {}
    with busy_processes(count):
        for name, once in cases.items():
            spent = sorted(once() for _ in range(max(2, BUSY_REPEATS * repeats)))
            figures[name] = {
                "mean": round(statistics.mean(spent), 2),
                "p99": round(statistics.quantiles(spent, n=100)[98], 2),
            }
    return figures


def loaded(folder: str, threads: int) -> tuple[PackedLM, PreTrainedModel]:
    """A model's folder, loaded as a service does and as transformers does."""
    own = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    return PackedLM.load(folder, threads=threads), own.eval().requires_grad_(False)


def print_table(medians: dict[str, float], small: dict[str, float], over_floor: dict[str, float]) -> None:
    """Prints the medians of both models to stderr."""
    print(f"{'pass':<14}{'ms':>8}{'/ own_1':>9}{'/ floor':>9}", file=sys.stderr)
    for name, spent in medians.items():
        ratios = f"{spent / medians['own_1']:>9.2f}{over_floor[name]:>9.2f}"
        print(f"{name:<14}{spent:>8.2f}{ratios}", file=sys.stderr)
    print(f"{SMALL_LAYERS} layers of {SMALL_WIDTH}:", file=sys.stderr)
    for name, spent in small.items():
        print(f"{name:<14}{spent:>8.3f}{spent / small['own_1']:>9.2f}", file=sys.stderr)


def products_of(lm: PackedLM) -> list[TunedProduct]:
    """The products that one pass of the model computes."""
    layers = [layer for layer in lm.model.modules() if isinstance(layer, PackedLinear)]
    products = dict.fromkeys(layer.product for layer in layers)
    return [product for product in products if isinstance(product, TunedProduct)]


def kernels_of(products: list[TunedProduct]) -> dict[str, dict[str, str]]:
    """The chosen kernel by shape of the stacked weights, ``out x in``, and by range of rows."""
    return {f"{one.out_features}x{one.in_features}": one.choice.ranges() for one in products}


def weight_bytes(products: list[TunedProduct], *, as_compiled: bool = False) -> int:
    """Bytes of the weights in float32, or as compiled passes keep them, without the padding of panels."""
    sizes = {one: 4 * one.out_features * one.in_features for one in products}
    if as_compiled:
        halved = [one for one in products if smallest_panels(one.weight(), 32).dtype is torch.bfloat16]
        sizes |= {one: sizes[one] // 2 for one in halved}
    return sum(sizes.values())


def floor_of(weights: int) -> dict[str, Any]:
    """The time in which torch's threads read `weights` bytes once: no pass over these weights is shorter."""
    cache = cache_bytes()
    again_s, far = read_seconds(weights), max(FROM_MEMORY * cache, 2**28)
    memory_bytes_s = far / read_seconds(far)
    return {
        "weights_mb": round(weights / 1e6, 2),
        "cache_mb": round(cache / 1e6, 2),
        "weights_in_cache": weights < cache,
        "gb_s": round(weights / again_s / 1e9, 2),
        "memory_gb_s": round(memory_bytes_s / 1e9, 2),
        "ms": round(1e3 * again_s, 3),
        "memory_ms": round(1e3 * weights / memory_bytes_s, 3),
    }


def over_floors(
    medians: Mapping[str, float], floor: dict[str, Any], compiled_floor: dict[str, Any]
) -> dict[str, float]:
    """Each median over the floor of the weights that the pass reads."""

    def floor_ms(name: str) -> float:
        reads_fewer = name.startswith(("compiled_", LLAMA + BFLOAT16))
        ms: float = (compiled_floor if reads_fewer and compiled_floor else floor)["ms"]
        return ms

    return {name: round(spent / floor_ms(name), 2) for name, spent in medians.items()}


class LlamaPasses:
    """Passes of llama.cpp over one model in each of its formats. Each call of `measure` adds times."""

    def __init__(self, program: str | None, files: Mapping[str, Path], threads: int) -> None:
        self._program = program
        self._files = files
        self._threads = threads
        self._times: dict[str, list[float]] = {}

    def measure(self, repeats: int) -> None:
        """Times each pass `repeats` times; does nothing without a program or files."""
        if self._program is None:
            return
        for end, file in self._files.items():
            found = pass_times(self._program, file, ROWS, CONTEXT, self._threads, repeats)
            for rows, spent in found.items():
                self._times.setdefault(f"{LLAMA}{end}_{rows}", []).extend(spent)

    def medians(self) -> dict[str, float]:
        """Median milliseconds of each case by name."""
        return {name: round(statistics.median(spent), 3) for name, spent in self._times.items()}


@contextlib.contextmanager
def llama_passes(settings: argparse.Namespace) -> Iterator[LlamaPasses]:
    """Passes of llama.cpp over the model that the settings name; none without a model or the program.

    A program that is merely on PATH is left out where the model cannot be converted; exits where the flag
    names the program.
    """
    program = find_program(settings.llama_bench, PROGRAM)
    with contextlib.ExitStack() as held:
        files: Mapping[str, Path] = {}
        if settings.model and program:
            try:
                require_gguf(program)
                files = held.enter_context(target_files(settings.model))
            except (SystemExit, ValueError) as error:
                if settings.llama_bench:
                    raise SystemExit(f"--{PROGRAM}: {error}") from error
                print(f"without {PROGRAM}: {error}", file=sys.stderr)
        yield LlamaPasses(program, files, settings.threads)


def main() -> None:
    """Measures, prints a table to stderr and the result as the last line of stdout."""
    parser = command_line("packed_step", __doc__, is_curve=True)
    parser.add_argument("--repeats", type=int, default=100, help="repeats of each case (default 100)")
    parser.add_argument("--layers", type=int, default=12, help="layers of the model (default 12)")
    parser.add_argument("--model", help="folder of a model to measure instead of a random-weight Llama")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default 1)")
    parser.add_argument("--compiled", action="store_true", help="time compiled passes too")
    parser.add_argument(
        "--llama-bench", metavar="PATH", help="llama.cpp's llama-bench; default: the one on PATH, if any"
    )
    parser.add_argument(
        "--busy", type=int, default=0, help="processes beside which compiled passes are timed again"
    )
    settings = parser.parse_args()
    if settings.llama_bench and not settings.model:
        parser.error(f"--{PROGRAM} is given without --model: llama.cpp reads the model of a folder")
    with llama_passes(settings) as llama:
        measure_all(settings, llama)


def measure_all(settings: argparse.Namespace, llama: LlamaPasses) -> None:
    """Measures all cases, and prints the table and the result."""
    torch.set_num_threads(settings.threads)
    started = time.perf_counter()
    lm, theirs = loaded(settings.model, settings.threads) if settings.model else random_pair(settings.layers)
    products = products_of(lm)
    floor = floor_of(weight_bytes(products))
    cases = {f"own_{rows}": transformers_pass(theirs, rows) for rows in ROWS}
    cases |= {f"packed_1x{rows}": packed_pass(lm, 1, rows) for rows in ROWS}
    cases |= {f"packed_{count}x{rows}": packed_pass(lm, count, rows) for count, rows in SHAPES}
    compiling: dict[str, float] = {}
    compiled: dict[str, Case] = {}
    compiled_floor: dict[str, Any] = {}
    if settings.compiled:
        twin, compiling = compiled_twin(settings, cases["packed_1x1"])
        compiled_floor = floor_of(weight_bytes(products, as_compiled=True))
        compiled = {f"compiled_1x{rows}": packed_pass(twin, 1, rows) for rows in ROWS}
        compiled |= {f"compiled_{count}x{rows}": packed_pass(twin, count, rows) for count, rows in SHAPES}
    llama.measure(max(1, settings.repeats // 2))
    # Apart: eager passes leave threads that spin, and a service with compiled passes runs no eager ones.
    medians = measure(cases, settings.repeats) | measure(compiled, settings.repeats)
    llama.measure(max(1, settings.repeats // 2))
    medians |= llama.medians()
    some = {name: once for name, once in compiled.items() if name in BUSY_CASES}
    over_floor = over_floors(medians, floor, compiled_floor)
    small = measure(small_cases(), settings.repeats)
    print_table(medians, small, over_floor)
    overheads = {name.removeprefix("overhead_"): ms for name, ms in small.items() if "overhead" in name}
    whole = {name: ms for name, ms in small.items() if "overhead" not in name}
    fields = {
        "ms": medians,
        "floor": floor,
        "compiled_floor": compiled_floor,
        "over_floor": over_floor,
        "kernels": kernels_of(products),
        "compiling": compiling,
        "beside_busy_ms": beside_busy(some, settings.busy, settings.repeats) if settings.busy else {},
        "small_ms": whole,
        "pass_overhead_ms": overheads,
    }
    print_result("packed_step", settings_of(settings) | {"context": CONTEXT}, started, fields, settings.plot)


if __name__ == "__main__":
    main()
