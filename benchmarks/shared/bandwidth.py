"""How fast this machine reads memory: the floor of whatever has to read a model's weights."""

import time
from pathlib import Path

import torch

_LEAST_S = 0.2
"""Shortest time in which a buffer is read again and again, in seconds; the fastest reading counts."""

_LEAST_TIMES = 3


def _sum(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.sum()


def _product(numbers: torch.Tensor) -> torch.Tensor:
    return torch.dot(numbers, numbers)


def read_seconds(size: int) -> float:
    """Shortest time in which torch's threads read a buffer of ``size`` bytes that they read just before."""
    numbers = torch.ones(max(1, size // 4))
    times: list[float] = []
    while sum(times) < _LEAST_S or len(times) < 2 * _LEAST_TIMES:
        for read in (_sum, _product):
            started = time.perf_counter()
            read(numbers)
            times.append(time.perf_counter() - started)
    return min(times)


def cache_bytes() -> int:
    """Size of the processor's last-level cache in bytes; 0 where the system does not tell."""
    caches = Path("/sys/devices/system/cpu/cpu0/cache")
    sizes = [path.read_text().strip() for path in caches.glob("index*/size")]
    return max(
        (int(size.rstrip("KM")) * (2**20 if size.endswith("M") else 2**10) for size in sizes), default=0
    )
