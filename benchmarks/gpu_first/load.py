"""Stage load: what loading an 8B does: the check, the choice of passes, the profile, and every capture."""

import os
import subprocess
import sys
import time
from functools import cached_property
from statistics import median
from typing import Any

import torch

from benchmarks.gpu_first.machine import Machine
from benchmarks.gpu_first.report import Part, Results
from outrider.lm.graphs.backend_choice import step_ms, use_graphs, use_ragged
from outrider.lm.graphs.capture import Capture, CudaGraphs, Run, eager
from outrider.lm.load import check
from outrider.lm.runner import PackedLM
from outrider.lm.step_profile import profile_steps
from speculative.errors import ModelRefused
from verifier_service.engine.step_cost import StepCostModel

PYTEST = (
    "-c", "/dev/null", "--rootdir=.", "--import-mode=importlib", "-p", "no:cacheprovider", "--noconftest",
    "-W", "ignore", "-m", "gpu", "-q", "tests/lm/test_gpu_steps.py", "tests/gpu/test_on_a_gpu.py",
)  # fmt: skip
"""Without the configuration, which asks for plugins that a GPU machine may lack."""


def parts(machine: Machine) -> dict[str, Part]:
    """The parts of the stage by name."""
    stage = Load(machine)
    return {
        "check": stage.check,
        "choice": stage.choice,
        "profile": stage.profile,
        "captures": stage.captures,
        "tests": stage.tests,
    }


class TimedCaptures:
    """A Capture that notes how long each capture took, and what it left allocated."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._capture: Capture = CudaGraphs() if machine.device.is_gpu else eager
        self.seconds: list[float] = []
        self.memory_mb: list[int] = []

    def __call__(self, run: Run) -> Run:
        """Captures the step and notes the time."""
        began = time.perf_counter()
        replay = self._capture(run)
        self._machine.device.settle()
        self.seconds.append(round(time.perf_counter() - began, 3))
        self.memory_mb.append(self._machine.memory_mb())
        return replay


class Load:
    """Parts that share one 8B-shaped model."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._kernel = "triton" if machine.device.is_gpu else "gathered"

    @cached_property
    def _lm(self) -> PackedLM:
        return self._machine.model(self._machine.eight, 1024 if self._machine.tiny else 65536)

    @cached_property
    def _trial(self) -> check.Trial:
        return check.Trial.of(self._lm)

    def check(self) -> Results:
        """Differences between packed passes and the model's own forward, which the check at load bounds."""
        began = time.perf_counter()
        fields: dict[str, Any] = {"memory_mb": self._machine.memory_mb(), "own": self._trial.own}
        for way in ("ragged", "static"):
            if way == "static":
                use_graphs(self._lm, self._kernel)
            fields |= {f"{way}_{name}": value for name, value in self._differences().items()}
        use_ragged(self._lm)
        yield "check", fields | {"seconds": round(time.perf_counter() - began, 1)}

    def _differences(self) -> dict[str, Any]:
        trial = self._trial
        try:
            trial.verify(self._lm)
            refused = None
        except ModelRefused as error:
            refused = str(error)
        found = check._packed_logits(self._lm, trial.sessions, trial.shape)
        worst = check.Difference(0.0, 0.0)
        for got, want in zip(found, trial.expected, strict=True):
            worst = worst.worse(check.Difference.of(got, want))
        return {"worst": round(worst.logit, 5), "row": round(worst.row, 5), "refused": refused}

    def choice(self) -> Results:
        """Milliseconds of small steps, ragged and static."""
        ragged = step_ms(self._lm)
        captures = TimedCaptures(self._machine)
        use_graphs(self._lm, self._kernel, captures)
        yield "choice", {"ragged_ms": ragged, "static_ms": step_ms(self._lm), "captures_s": captures.seconds}

    def profile(self) -> Results:
        """The profile of a verifier at load, how long it takes, and what it expects of some sizes."""
        captures = TimedCaptures(self._machine)
        use_graphs(self._lm, self._kernel, captures)
        began = time.perf_counter()
        costs = StepCostModel.of(profile_steps(self._lm))
        seconds = time.perf_counter() - began
        expected = {rows: round(costs.expected_ms(rows), 3) for rows in (1, 9, 17, 33, 65, 129, 257, 512)}
        fields = {"seconds": round(seconds, 2), "expected_ms": expected}
        yield "profile", fields | {"captures_s": captures.seconds}

    def captures(self) -> Results:
        """Seconds and memory of the captures that a service makes before it serves."""
        captures = TimedCaptures(self._machine)
        steps = use_graphs(self._lm, self._kernel, captures)
        before = self._machine.memory_mb()
        began = time.perf_counter()
        with torch.inference_mode():
            # A third of the stage's time: finer sizes that there is no time for are left out.
            steps.capture_all(0.5 if self._machine.tiny else 35.0)
        fields = {
            "all_s": round(time.perf_counter() - began, 1),
            "median_s": round(median(captures.seconds), 4),
            "longest_s": max(captures.seconds),
            "count": len(captures.seconds),
            "sizes": len(steps.shapes),
            "memory_mb": [before, *captures.memory_mb[:3], captures.memory_mb[-1]],
        }
        yield "captures", fields

    def tests(self) -> Results:
        """The tests that need a GPU."""
        if not self._machine.device.is_gpu:
            yield "tests", {"skipped": "there is no GPU"}
            return
        environment = {**os.environ, "TRITON_INTERPRET": "0"}
        command = [sys.executable, "-m", "pytest", *PYTEST]
        ended = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=150, check=False
        )
        yield "tests", {"status": ended.returncode, "says": ended.stdout.splitlines()[-25:]}
