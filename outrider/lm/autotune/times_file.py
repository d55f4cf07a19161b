"""Measured times of kernels, kept in the process and in a file by processor, torch version and threads."""

import hashlib
import json
import logging
import math
import os
import platform
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from outrider.lm.autotune.choice import MEASURED_ROWS, KernelTimes, LinearKernel

log = logging.getLogger(__name__)

_MOST_BYTES = 2**20
"""Largest file that is read: a shape takes 700 bytes, so a file of many models is smaller."""

_FORMAT = 1
"""Number of the file's format and of the way in which times are measured; raise it with either."""


class Shape(NamedTuple):
    """Shape of a stacked weight; weights of one shape are multiplied alike."""

    out_features: int
    in_features: int
    has_bias: bool

    def __str__(self) -> str:
        return f"{self.out_features}x{self.in_features}{'+bias' if self.has_bias else ''}"


class TimesFile:
    """Times of the products of all shapes seen under the present number of threads.

    A file that is broken, or was measured on another machine, is ignored with a warning and written anew.
    """

    def __init__(self, folder: Path | None) -> None:
        """Reads the file in ``folder``; None: times are kept in this process alone."""
        self._machine = _machine()
        key = json.dumps(self._machine, sort_keys=True)
        self._seen = _of_process(key)
        self._path = None
        if folder is not None:
            self._path = folder / f"linear-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
            for shape, times in self._read().items():
                self._seen.setdefault(shape, times)

    def get(self, shape: Shape) -> KernelTimes | None:
        """The times of a shape; None for a shape that was not measured."""
        return self._seen.get(str(shape))

    def add(self, shape: Shape, times: KernelTimes) -> None:
        """Keeps the times of a shape, in the file too where there is one."""
        self._seen[str(shape)] = times
        if self._path is not None and not self._write(self._path):
            self._path = None

    def _read(self) -> dict[str, KernelTimes]:
        """The times in the file by shape; none where the file is missing or cannot be used."""
        assert self._path is not None
        try:
            with self._path.open("rb") as file:
                text = file.read(_MOST_BYTES + 1)
            if len(text) > _MOST_BYTES:
                raise ValueError(f"it is larger than {_MOST_BYTES} bytes")
            return _parsed(json.loads(text), self._machine)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            log.warning("%s is ignored, and kernels are measured again: %s", self._path, error)
            return {}

    def _write(self, path: Path) -> bool:
        """Replaces the file by one with all times that this process knows; returns whether it could."""
        times = {shape: _rounded(times) for shape, times in self._seen.items()}
        text = json.dumps({"machine": self._machine, "times": times}, indent=1)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            number, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
            try:
                with os.fdopen(number, "w") as file:
                    file.write(text)
                Path(name).replace(path)
            except OSError:
                Path(name).unlink(missing_ok=True)
                raise
        except OSError as error:
            log.warning("measured times of kernels are not kept for later starts: %s", error)
            return False
        return True


@cache
def _of_process(machine: str) -> dict[str, KernelTimes]:
    """Times by shape that this process knows for a machine and a number of threads."""
    return {}


def _machine() -> dict[str, Any]:
    """What the times depend on beside the shape."""
    processor = {"model name": platform.machine(), "flags": ""}
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() in processor:
                processor[name.strip()] = value.strip()
    except OSError:
        pass
    return {
        "format": _FORMAT,
        "processor": processor["model name"],
        "flags": hashlib.sha256(processor["flags"].encode()).hexdigest()[:16],
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def _rounded(times: KernelTimes) -> dict[str, dict[str, float]]:
    """Times as the file has them: seconds with seven places."""
    return {
        kernel.value: {str(count): round(spent, 7) for count, spent in by_rows.items()}
        for kernel, by_rows in times.items()
    }


def _parsed(content: Any, machine: dict[str, Any]) -> dict[str, KernelTimes]:
    """The times by shape in a file's content. Raises ValueError for content that is not of this machine."""
    if not isinstance(content, dict) or not isinstance(content.get("times"), dict):
        raise ValueError("it holds no times")
    if content.get("machine") != machine:
        raise ValueError("it was measured on another machine or by another version")
    return {str(shape): _parsed_times(times) for shape, times in content["times"].items()}


def _parsed_times(content: Any) -> KernelTimes:
    """The times of one shape. Raises ValueError unless all kernels have the same numbers of rows."""
    if not isinstance(content, dict) or set(content) != {kernel.value for kernel in LinearKernel}:
        raise ValueError("a shape does not have the times of all kernels")
    counts = {tuple(by_rows) if isinstance(by_rows, dict) else () for by_rows in content.values()}
    known = tuple(map(str, MEASURED_ROWS))
    if len(counts) != 1 or not (rows := counts.pop()) or rows != known[: len(rows)]:
        raise ValueError("a shape does not have the times of the measured numbers of rows")
    times = {
        LinearKernel(name): {int(row): by_rows[row] for row in rows} for name, by_rows in content.items()
    }
    for by_rows in times.values():
        for spent in by_rows.values():
            if not isinstance(spent, float) or not math.isfinite(spent) or spent <= 0:
                raise ValueError(f"a time is {spent!r} instead of seconds above 0")
    return times
