"""Stage kernel: whether the attention kernel is right on this GPU, and how fast."""

import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import torch

from benchmarks.gpu_first.attention_case import AttentionCase, Heads
from benchmarks.gpu_first.machine import Machine
from benchmarks.gpu_first.report import Part, Results
from outrider.lm.attention.kernels.gathered import attend_gathered
from outrider.lm.attention.metadata import Attend
from outrider.lm.graphs.backend_choice import KERNELS
from speculative.implementations import load_implementation

TREES = {
    "one row": ((37, 0, 1),),
    "the first row of all": ((0, 0, 1),),
    "trees of several lengths": ((5, 0, 9), (40, 6, 3), (0, 3, 5), (33, 0, 1)),
    "a prefix in several spans": ((700, 5, 6), (310, 0, 1)),
    "a large tree": ((500, 0, 65),),
    "a whole mask of nodes": ((20, 190, 60),),
    "seventy sessions": tuple((60 + at, 0, 1) for at in range(70)),
    "a long session among many short ones": ((4000, 0, 17), *(((30, 0, 17),) * 40)),
}
HEADS = {
    "llama": Heads(),
    "llama_int8": Heads(int8=True),
    "phi": Heads(heads=32, key_heads=32, width=96, value_width=96),
    "qwen3": Heads(heads=16, key_heads=8, width=128, value_width=128),
    "gemma2": Heads(heads=8, key_heads=4, width=256, value_width=256, window=300, softcap=50.0),
    "gpt_oss": Heads(heads=64, key_heads=8, width=64, value_width=64, window=128, sinks=True),
    "deepseek_v3": Heads(heads=16, key_heads=16, width=192, value_width=128),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ALLOWED = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Accepted distance of an output from the reference, relative to the reference's size."""
SPEEDS = tuple(product((1024, 8192, 32768), (1, 8, 32), (1, 33, 65)))
"""Context, sessions and rows of each session in the timed cases."""


def parts(machine: Machine) -> dict[str, Part]:
    """The parts of the stage by name."""
    return {
        "speed": lambda: speed(machine),
        "large_addresses": lambda: large_addresses(machine),
        "few_cases": lambda: few_cases(machine),
        "memcheck": lambda: memcheck(machine),
        "cases": lambda: cases(machine),
    }


def kernel_of(machine: Machine) -> Attend:
    """The kernel that serves on this device; without a GPU the reference stands in for itself."""
    attend: Attend = load_implementation(KERNELS, "triton" if machine.device.is_gpu else "gathered")
    return attend


def cases(machine: Machine) -> Results:
    """Distance of the kernel's output from the reference, over families, trees and dtypes."""
    wrong = []
    kernel = kernel_of(machine)
    count = 0
    for family, heads in list(HEADS.items())[: 2 if machine.tiny else None]:
        worst = dict.fromkeys(DTYPES, 0.0)
        began = time.perf_counter()
        for name, trees in list(TREES.items())[: 3 if machine.tiny else None]:
            for dtype in DTYPES:
                case = AttentionCase(heads, trees, dtype, machine.name, seed=count)
                distance = distance_of(case, kernel)
                worst[dtype] = max(worst[dtype], distance)
                count += 1
                if not distance <= ALLOWED[dtype]:
                    wrong.append({"family": family, "trees": name, "dtype": str(dtype), "distance": distance})
        fields = {f"worst_{str(dtype).removeprefix('torch.')}": value for dtype, value in worst.items()}
        yield f"cases_{family}", fields | {"seconds": round(time.perf_counter() - began, 1)}
    yield "cases", {"cases": count, "wrong": wrong}
    if machine.device.is_gpu:
        yield "compiled", {"kernels": list(compiled())}
    if wrong:
        raise ValueError(f"{len(wrong)} of {count} cases differ from the reference")


def distance_of(case: AttentionCase, kernel: Attend) -> float:
    """Distance of the kernel's output from the reference, relative to the reference's size; inf for NaN."""
    with torch.inference_mode():
        expected, found = case.attend(attend_gathered).float(), case.attend(kernel).float()
    if found[case.rows :].any():
        return float("inf")
    distance = float((found - expected).norm() / expected.norm().clamp_min(1e-20))
    return distance if distance == distance else float("inf")


def compiled() -> list[str]:
    """Registers, spills and shared memory of every variant that was compiled, as far as Triton tells."""
    from outrider.lm.attention.kernels import tree_attention

    lines = []
    for kernel in vars(tree_attention).values():
        for cache in getattr(kernel, "device_caches", {}).values():
            for variant in getattr(cache[0], "values", list)():
                shared = getattr(getattr(variant, "metadata", None), "shared", None)
                registers, spills = getattr(variant, "n_regs", None), getattr(variant, "n_spills", None)
                lines.append(f"{getattr(variant, 'name', kernel)}: {registers} {spills} {shared}")
    return lines


def large_addresses(machine: Machine) -> Results:
    """A plane of more than 2^31 elements: the last head's keys lie where 32 bits do not reach."""
    slots = 1024 if machine.tiny else 2**21
    if machine.device.is_gpu and torch.cuda.mem_get_info()[0] < 24 * 2**30:
        yield "large_addresses", {"skipped": "less than 24 GiB are free"}
        return
    heads = Heads(heads=8, key_heads=8)
    case = AttentionCase(heads, ((300, 0, 5),), torch.bfloat16, machine.name)
    small = case.pool.planes()
    large = [torch.zeros(8, slots, 128, dtype=torch.bfloat16, device=machine.name) for _ in small]
    for plane, source in zip(large, small, strict=True):
        plane[:, : source.shape[1]] = source[:, :slots]
    expected = case.attend(attend_gathered)
    case.keys, case.values = large
    found = case.attend(kernel_of(machine))
    yield "large_addresses", {"elements": large[0].numel(), "distance": float((found - expected).abs().max())}


def speed(machine: Machine) -> Results:
    """Microseconds and bandwidth of the kernel for an 8B's heads in bfloat16, over bfloat16 and over int8."""
    heads = Heads(heads=4, key_heads=2, width=16, value_width=16) if machine.tiny else Heads()
    kernel = kernel_of(machine)
    sizes = ((64, 1, 1),) if machine.tiny else SPEEDS
    for int8, (context, batch, rows) in product((False, True), sizes):
        trees = ((context, 0, rows),) * batch
        case = AttentionCase(replace(heads, int8=int8), trees, machine.dtype, machine.name, apart=False)
        with torch.inference_mode():
            once = captured(machine, case, kernel)
            ms = machine.device.ms(once, machine.repeats)
        gigabytes = case.read_bytes / ms / 1e6
        kind = "_int8" if int8 else ""
        yield (
            f"speed{kind}_{batch}x{rows}_{context}",
            {"us": round(ms * 1e3, 2), "gb_per_s": round(gigabytes, 1)},
        )


def captured(machine: Machine, case: AttentionCase, kernel: Attend) -> Callable[[], Any]:
    """The kernel's call as a graph on a GPU, and as it is elsewhere."""
    if not machine.device.is_gpu:
        return lambda: case.attend(kernel)
    case.attend(kernel)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.attend(kernel)
    replay: Callable[[], Any] = graph.replay
    return replay


def few_cases(machine: Machine) -> Results:
    """Three small cases, for the sanitizer."""
    kernel = kernel_of(machine)
    heads = Heads(heads=8, key_heads=2, width=64, value_width=64)
    for name in ("trees of several lengths", "a prefix in several spans", "a large tree"):
        case = AttentionCase(heads, TREES[name], torch.bfloat16, machine.name)
        yield "few_cases", {"trees": name, "distance": distance_of(case, kernel)}


def memcheck(machine: Machine) -> Results:
    """The small cases under compute-sanitizer: reads and writes out of bounds."""
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None or not machine.device.is_gpu:
        yield "memcheck", {"skipped": "there is no compute-sanitizer, or no GPU"}
        return
    own = [
        "-m",
        "benchmarks.gpu_first",
        "--out",
        str(machine.out),
        "--stage",
        "kernel",
        "--part",
        "few_cases",
    ]
    command = [sanitizer, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, *own]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    yield "memcheck", {"status": ended.returncode, "says": (ended.stdout + ended.stderr)[-800:]}
