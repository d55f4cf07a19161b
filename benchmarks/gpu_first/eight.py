"""Stage eight: steps of an 8B-shaped model, where their time goes, and what compiled layers bring."""

import time
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import torch

from benchmarks.gpu_first.machine import Machine
from benchmarks.gpu_first.report import Part, Results
from benchmarks.gpu_step import StepBench
from benchmarks.shared.random_llama import prefilled, static_steps
from outrider.lm.device.digest import RowDigester, digester_for
from outrider.lm.device.layout import ASK_WORDS, DigestLevel
from outrider.lm.plan import PassPlan, SequenceRows
from outrider.lm.runner import PackedLM

BATCHES, TREES = (1, 8, 32), (0, 32, 64)
_MATRIX_PRODUCTS = ("gemm", "cutlass", "cublas", "nvjet", "splitk", "xmma", "gemv")
_ATTENTION = ("_attend", "_join")


def parts(machine: Machine) -> dict[str, Part]:
    """The parts of the stage by name."""
    stage = Eight(machine)
    return {
        "layers": stage.layers,
        "steps": stage.steps,
        "kernels": stage.kernels,
        "digests": stage.digests,
        "one_billion": stage.one_billion,
    }


class Eight:
    """Parts that share one 8B-shaped model."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    @cached_property
    def _bench(self) -> StepBench:
        machine = self._machine
        return StepBench(machine.plan, machine.device, machine.dtype, machine.repeats)

    def steps(self) -> Results:
        """Steps of serving, in all and by part, beside their floor."""
        tiny = self._machine.tiny
        for batch in self._machine.plan.batches if tiny else BATCHES:
            for tree in self._machine.plan.trees if tiny else TREES:
                yield f"step_{batch}x{tree}", self._bench.row(batch, tree)

    def kernels(self) -> Results:
        """Kernels of one replay by name, their count and time: where the time of a step goes."""
        for rows in (1, 5) if self._machine.tiny else (1, 65, 520):
            self._bench.use_static()
            replay = _replay(self._machine, self._bench.lm, rows)
            yield f"kernels_{rows}", _kernels(self._machine, replay)

    def digests(self) -> Results:
        """Milliseconds of the digests of bfloat16 rows, by level, and of their greatest logit alone."""
        device = torch.device(self._machine.name)
        vocabulary = self._machine.eight.vocabulary
        digester = digester_for(vocabulary, device) or RowDigester(vocabulary, device)
        for rows in (4,) if self._machine.tiny else (1, 64, 512):
            yield f"digests_{rows}", self._digest_ms(digester, rows)

    def _digest_ms(self, digester: RowDigester, rows: int) -> dict[str, float]:
        machine = self._machine
        logits = torch.randn(rows, machine.eight.vocabulary, device=machine.name, dtype=machine.dtype)
        words = ASK_WORDS + digester.capacity.named
        asks = torch.ones(rows, words, dtype=torch.int64, device=machine.name)
        asks[:, 2] = torch.tensor(0.8, dtype=torch.float64).view(torch.int64)
        ways: dict[str, Callable[[], Any]] = {"argmax_ms": lambda: logits.argmax(1)}
        for level in DigestLevel:
            ways[f"{level.name.lower()}_ms"] = partial(digester.compute, logits, asks, level)
        return {
            name: round(machine.device.ms(_graph_of(machine, once), machine.repeats), 4)
            for name, once in ways.items()
        }

    def layers(self) -> Results:
        """Graphs of steps before and after their layers are compiled; later parts run them compiled."""
        machine, rows = self._machine, (1, 5) if self._machine.tiny else (1, 33, 65)

        def replayed_ms() -> dict[int, float]:
            return {
                count: round(machine.device.ms(_replay(machine, self._bench.lm, count), machine.repeats), 4)
                for count in rows
            }

        before, began = replayed_ms(), time.perf_counter()
        self._bench.compile_layers()
        seconds = round(time.perf_counter() - began, 1)
        for count, ms in replayed_ms().items():
            yield f"layers_{count}", {"eager_ms": before[count], "compiled_ms": ms, "compiling_s": seconds}

    def one_billion(self) -> Results:
        """One pass of a drafter of 1B."""
        machine = self._machine
        lm = machine.model(machine.one, 4096)
        for rows in (1, 5):
            ms = machine.device.ms(_replay(machine, lm, rows), machine.repeats)
            yield f"one_billion_{rows}", {"device_ms": round(ms, 4)}


def _replay(machine: Machine, lm: PackedLM, rows: int) -> Callable[[], Any]:
    """The graph of one session's step of this many rows, anew; its host side is not repeated."""
    steps = lm.steps or static_steps(lm, machine.device)
    table = prefilled(lm, [1] * (32 if machine.tiny else 1024))
    share = SequenceRows(table, [1] * rows, [-1] * rows, range(rows))
    with torch.inference_mode():
        shape = steps.prepare(PassPlan([share], lm.pool, lm.model.dtype), [1] * rows, range(rows))
        steps.replay(shape)
    lm.release(table)

    def replay() -> None:
        with torch.inference_mode():
            steps.replay(shape)

    return replay


def _graph_of(machine: Machine, once: Callable[[], Any]) -> Callable[[], Any]:
    if not machine.device.is_gpu:
        return once
    once()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        once()
    replay: Callable[[], Any] = graph.replay
    return replay


def _kernels(machine: Machine, once: Callable[[], Any]) -> dict[str, Any]:
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if machine.device.is_gpu:
        kinds = [torch.profiler.ProfilerActivity.CUDA]
    once()
    machine.device.settle()
    with torch.profiler.profile(activities=kinds) as profile:
        once()
        machine.device.settle()
    events = [event for event in profile.events() if not machine.device.is_gpu or _on_device(event)]
    by_name: dict[str, list[float]] = {}
    for event in events:
        took = event.device_time if machine.device.is_gpu else event.self_cpu_time_total
        by_name.setdefault(event.name, []).append(float(took))
    total = sum(map(sum, by_name.values()))
    elementwise = sum(sum(times) for name, times in by_name.items() if not _is_large(name))
    spans = [(event.time_range.start, event.time_range.end) for event in events]
    wall = max(end for _, end in spans) - min(start for start, _ in spans)
    longest = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:25]
    return {
        "count": len(events),
        "busy_us": round(total, 1),
        "wall_us": round(wall, 1),
        "elementwise_share": round(elementwise / total, 4) if total else None,
        "longest": [{"name": name[:90], "count": len(us), "us": round(sum(us), 1)} for name, us in longest],
    }


def _on_device(event: Any) -> bool:
    return bool(event.device_type == torch.profiler.DeviceType.CUDA)


def _is_large(name: str) -> bool:
    return any(part in name.lower() for part in (*_MATRIX_PRODUCTS, *_ATTENTION))
