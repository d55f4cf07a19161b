"""What to set for a pair, from what was measured. Pure."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import ceil, prod
from typing import Any

WORTH = 1.05
"""The speedup, over all temperatures, from which on a drafter is worth its processor."""
_SESSIONS = 8
"""Requests of full length at once that keys and values shall have room for, where memory allows."""
_LEAST_KV_MB = 64
_SHARE_OF_MEMORY = 4


@dataclass(frozen=True, slots=True)
class Drafting:
    """What drafting brought in simulated time, at one temperature and one limit of nodes."""

    temperature: float
    nodes: int
    acceptance_length: float
    """Tokens per pass of the target; 1 is plain decoding."""
    expected_speedup: float
    """Over plain decoding of the same target, where the drafter has cores of its own."""


@dataclass(frozen=True, slots=True)
class Advice:
    """A recommendation and its reason."""

    drafter: bool
    nodes: int
    """Drafted nodes in one round; 0 without a drafter."""
    expected_speedup: float
    """The geometric mean over temperatures; 1 without a drafter."""
    why: str

    def as_object(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def advise(measured: Sequence[Drafting]) -> Advice:
    """The limit of nodes that brings most over all temperatures; no drafter where that is too little.

    Of limits that bring about as much, the smallest: nodes are rows that other sessions have to share.
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
    """Room for eight requests as long as the model takes, or a quarter of the memory where that is less."""
    wanted = ceil(bytes_per_id * max_length * _SESSIONS / 2**20)
    return max(_LEAST_KV_MB, min(wanted, memory_mb // _SHARE_OF_MEMORY))


def _mean(values: Sequence[float]) -> float:
    return prod(values) ** (1 / len(values))
