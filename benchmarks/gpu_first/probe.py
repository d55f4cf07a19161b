"""Stage probe: what the machine is, and how fast it copies, reads, multiplies and launches."""

import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from statistics import median
from typing import Any

import torch

from benchmarks.gpu_first.machine import Machine
from benchmarks.gpu_first.report import Part, Results

PACKAGES = ("torch", "triton", "transformers", "numpy", "pytest", "pydantic", "grpcio")
COPIES_KB = (512, 4096, 33 * 1024, 256 * 1024)
PINNED_MB = (64, 1024)
ROWS = (1, 16, 64, 128, 512, 2048)
NODES = 1000
FAILED_CAPTURE = """
import torch
numbers = torch.ones(8, device="cuda")
torch.cuda.synchronize()
before = torch.cuda.memory_reserved()
pool = torch.cuda.graph_pool_handle()
try:
    with torch.cuda.graph(torch.cuda.CUDAGraph(), pool=pool, capture_error_mode="thread_local"):
        (numbers * 2).sum().item()
except RuntimeError as error:
    print("failed:", str(error).partition(chr(10))[0])
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, capture_error_mode="thread_local"):
    doubled = numbers * 2
graph.replay()
print("captures again:", float(doubled.sum()) == 16.0)
large = torch.empty(2**28, dtype=torch.uint8, device="cuda")
held = torch.cuda.memory_reserved()
del large
torch.cuda.empty_cache()
print("gives memory back:", torch.cuda.memory_reserved() < held)
"""


def parts(machine: Machine) -> dict[str, Part]:
    """The parts of the stage by name."""
    return {
        "versions": lambda: versions(machine),
        "pinned": lambda: pinned(machine),
        "device_memory": lambda: device_memory(machine),
        "products": lambda: products(machine),
        "graph_nodes": lambda: graph_nodes(machine),
        "failed_capture": lambda: failed_capture(machine),
    }


def versions(machine: Machine) -> Results:
    """Versions of the software that decides speed, and the device's description of itself."""
    fields: dict[str, Any] = {"python": platform.python_version(), "cc": shutil.which("cc")}
    for name in PACKAGES:
        try:
            fields[name] = version(name)
        except PackageNotFoundError:
            fields[name] = None
    if machine.device.is_gpu:
        found = torch.cuda.get_device_properties(machine.name)
        fields |= {
            "gpu": found.name,
            "capability": f"{found.major}.{found.minor}",
            "processors": found.multi_processor_count,
            "memory_mb": found.total_memory // 2**20,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "driver": _driver(),
        }
    yield "versions", fields


def pinned(machine: Machine) -> Results:
    """Copies between pinned memory and the device, and what pinning costs."""
    for kilobytes in COPIES_KB[:2] if machine.tiny else COPIES_KB:
        name = f"pinned_{kilobytes // 1024}_mb" if kilobytes >= 1024 else f"pinned_{kilobytes}_kb"
        yield name, _copies(machine, kilobytes * 1024)
    for megabytes in () if machine.tiny else PINNED_MB:
        began = time.perf_counter()
        torch.empty(megabytes * 2**20, dtype=torch.uint8, pin_memory=machine.device.is_gpu)
        yield f"pinning_{megabytes}_mb", {"seconds": round(time.perf_counter() - began, 4)}


def _copies(machine: Machine, size: int) -> dict[str, float]:
    host = torch.empty(size, dtype=torch.uint8, pin_memory=machine.device.is_gpu)
    there = torch.empty(size, dtype=torch.uint8, device=machine.name)
    up = machine.device.ms(lambda: there.copy_(host, non_blocking=True), machine.repeats)
    down = machine.device.ms(lambda: host.copy_(there, non_blocking=True), machine.repeats)
    fields = {"up_gb_per_s": size / up / 1e6, "down_gb_per_s": size / down / 1e6, "down_ms": down}
    return {name: round(value, 4) for name, value in fields.items()}


def device_memory(machine: Machine) -> Results:
    """Bandwidth of a copy, and of reading alone."""
    megabytes = 16 if machine.tiny else 8192
    copied = machine.device.copied_bytes_per_second(megabytes // 2, machine.repeats)
    numbers = torch.ones(megabytes * 2**18, device=machine.name)
    ms = machine.device.ms(lambda: numbers.sum(), machine.repeats)
    fields = {"copy_tb_per_s": copied / 1e12, "read_tb_per_s": numbers.nbytes / ms / 1e9}
    yield "device_memory", {key: round(value, 4) for key, value in fields.items()}


def products(machine: Machine) -> Results:
    """A layer's seven products one by one, and as four with stacked weights, by number of rows.

    Several layers' weights take turns, so that none is found in a cache.
    """
    size = machine.eight
    keys = size.key_heads * size.head_width
    split = [
        (size.hidden, size.hidden), (keys, size.hidden), (keys, size.hidden), (size.hidden, size.hidden),
        (size.intermediate, size.hidden), (size.intermediate, size.hidden), (size.hidden, size.intermediate),
    ]  # fmt: skip
    stacked = [
        (size.hidden + 2 * keys, size.hidden), (size.hidden, size.hidden),
        (2 * size.intermediate, size.hidden), (size.hidden, size.intermediate),
    ]  # fmt: skip
    layers = 1 if machine.tiny else 8
    for rows in ROWS[:2] if machine.tiny else ROWS:
        ms = {}
        for name, shapes in (("split", split), ("stacked", stacked)):
            weights = [[_random(machine, *shape) for shape in shapes] for _ in range(layers)]
            inputs = {width: _random(machine, rows, width) for _, width in shapes}

            def layer(weights: Any = weights, inputs: Any = inputs) -> None:
                for each in weights:
                    for weight in each:
                        inputs[weight.shape[1]] @ weight.t()

            ms[name] = machine.device.ms(_replayed(machine, layer), machine.repeats) / layers
        values = sum(high * wide for high, wide in split)
        fields = {
            "split_ms": ms["split"],
            "stacked_ms": ms["stacked"],
            "split_over_stacked": ms["split"] / ms["stacked"],
            "split_tb_per_s": 2 * values / ms["split"] / 1e9,
            "split_tflops": 2 * values * rows / ms["split"] / 1e9,
        }
        yield f"products_{rows}", {key: round(value, 4) for key, value in fields.items()}


def graph_nodes(machine: Machine) -> Results:
    """Microseconds of one node of a graph of small kernels, each of which needs the one before."""
    nodes = 10 if machine.tiny else NODES
    small = torch.zeros(4096, dtype=machine.dtype, device=machine.name)

    def chain() -> None:
        for _ in range(nodes):
            small.add_(1)

    ms = machine.device.ms(_replayed(machine, chain), machine.repeats)
    yield "graph_nodes", {"us_per_node": round(ms * 1e3 / nodes, 3)}
    if not machine.device.is_gpu:
        return
    from benchmarks.gpu_first.dependent_launch import add_one

    for early in (False, True):

        def chained(early: bool = early) -> None:
            for _ in range(nodes):
                add_one(small, early)

        ms = median(machine.device.times_ms(_replayed(machine, chained), machine.repeats))
        yield f"triton_nodes_early_{early}", {"us_per_node": round(ms * 1e3 / nodes, 3)}


def failed_capture(machine: Machine) -> Results:
    """Whether a process still captures graphs, and gives memory back, after a capture that failed."""
    if not machine.device.is_gpu:
        yield "failed_capture", {"skipped": "there is no GPU"}
        return
    command = [sys.executable, "-c", FAILED_CAPTURE]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=40, check=False)
    lines = [line for line in ended.stdout.splitlines() if line]
    yield "failed_capture", {"status": ended.returncode, "lines": lines, "errors": ended.stderr[-600:]}


def _random(machine: Machine, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=machine.name, dtype=machine.dtype)


def _replayed(machine: Machine, once: Callable[[], Any]) -> Callable[[], Any]:
    """The work as one captured graph on a GPU, so that launches from Python are not what is timed."""
    if not machine.device.is_gpu:
        return once
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        once()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        once()
    replay: Callable[[], Any] = graph.replay
    return replay


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
