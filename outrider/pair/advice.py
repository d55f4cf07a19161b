"""Recommends settings for a pair from measurements. Pure."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import ceil, prod
from typing import Any

WORTH = 1.05
"""Smallest mean speedup over all temperatures for which a drafter is recommended."""
_SESSIONS = 8
"""Number of concurrent full-length requests to reserve keys and values for, where memory allows."""
_LEAST_KV_MB = 64
_SHARE_OF_MEMORY = 4


@dataclass(frozen=True, slots=True)
class Drafting:
    """Gain of drafting in simulated time, at one temperature and one limit of nodes."""

    temperature: float
    nodes: int
    acceptance_length: float
    """Tokens per pass of the target; plain decoding has 1."""
    expected_speedup: float
    """Speed relative to plain decoding of the same target, with cores of its own for the drafter."""


@dataclass(frozen=True, slots=True)
class Advice:
    """A recommendation for a pair, and its reason."""

    drafter: bool
    nodes: int
    """Largest number of drafted nodes in a round; 0 without a drafter."""
    expected_speedup: float
    """Geometric mean of the speedups over all temperatures; 1 without a drafter."""
    why: str

    def as_object(self) -> dict[str, Any]:
        """The advice as JSON prints it."""
        return asdict(self)


def advise(measured: Sequence[Drafting]) -> Advice:
    """Recommends the limit of nodes with the highest mean speedup; no drafter where that is below WORTH.

    Of limits within 1 % of the highest speedup it takes the smallest: nodes use rows that sessions share.
    """
    means = {
        nodes: _mean([one.expected_speedup for one in measured if one.nodes == nodes])
        for nodes in sorted({one.nodes for one in measured})
    }
    if not means:
        return Advice(False, 0, 1.0, "nothing could be measured")
    most = max(means.values())
    nodes = next(nodes for nodes, mean in means.items() if mean >= 0.99 * most)
    if most < WORTH:
        return Advice(False, 0, 1.0, f"it would bring {most:.2f} times the speed of plain decoding")
    why = f"{means[nodes]:.2f} times plain decoding; {nodes} nodes a round bring about as much as any limit"
    return Advice(True, nodes, round(means[nodes], 3), why)


def kv_mb(bytes_per_id: int, max_length: int, memory_mb: int) -> int:
    """MiB for keys and values of eight full-length requests; at most a quarter of the memory."""
    wanted = ceil(bytes_per_id * max_length * _SESSIONS / 2**20)
    return max(_LEAST_KV_MB, min(wanted, memory_mb // _SHARE_OF_MEMORY))


def _mean(values: Sequence[float]) -> float:
    return prod(values) ** (1 / len(values))
