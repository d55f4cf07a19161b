"""Searches the drafter's children, scale and width that are fastest for a pair on a machine. Pure."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from drafter_service.draft_tree import Growth

_DEFAULT = Growth()
CHOICES: dict[str, tuple[float, ...]] = {
    "nodes_per_pass": (1, 2, 3, 5, 8),
    "children": (1, 2, 3, 4, 6),
    "scale": (0.3, 0.45, 0.65, 1.0, 1.5),
}
"""The values to try of each setting."""
_ROUNDS = 2
"""How often the search goes through all settings."""
_WORTH = 1.005
"""Factor that another value must gain: a smaller gain is as likely the prompts' as the machine's."""


@dataclass(frozen=True, slots=True)
class DrafterTuning:
    """Settings of a drafter to try; by default those that it has where nothing is set."""

    nodes_per_pass: int = 5
    """Nodes expanded in one pass: the width."""
    children: int = _DEFAULT.children
    scale: float = _DEFAULT.scale

    @property
    def growth(self) -> Growth:
        """How trees grow with these settings."""
        return replace(_DEFAULT, children=self.children, scale=self.scale)

    def with_setting(self, name: str, value: float) -> "DrafterTuning":
        """These settings with another value of one setting."""
        return DrafterTuning(**(asdict(self) | {name: value}))

    def as_object(self) -> dict[str, Any]:
        """The settings by name."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class FoundTuning:
    """The result of a search."""

    tuning: DrafterTuning
    speedup: float
    """Speed relative to plain decoding."""
    default_speedup: float
    """Speed relative to plain decoding with the default settings."""
    tried: int
    """Number of settings that were measured."""


def search_tuning(measure: Callable[[DrafterTuning], float]) -> FoundTuning:
    """Goes along one setting after the other, twice, and keeps the fastest value of each.

    Args:
        measure: speed relative to plain decoding with these settings; called once for each.
    """
    best = DrafterTuning()
    measured = {best: measure(best)}
    for _ in range(_ROUNDS):
        before = best
        for name, values in CHOICES.items():
            for value in values:
                tuning = best.with_setting(name, value)
                if tuning not in measured:
                    measured[tuning] = measure(tuning)
            fastest = max((best.with_setting(name, value) for value in values), key=measured.__getitem__)
            if measured[fastest] > _WORTH * measured[best]:
                best = fastest
        if best == before:
            break
    return FoundTuning(best, measured[best], measured[DrafterTuning()], len(measured))
