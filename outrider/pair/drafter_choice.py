"""Chooses a drafter for a target: from the table of families, else from the models of this machine. Pure.

A drafter must be several times cheaper than its target, so models of more than a quarter of the target's size
are left out. The smallest model comes first.
"""

import re
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

LARGEST_SHARE = 0.25
"""The largest size of a drafter, as a share of the target's."""
TABLE = Path(__file__).with_name("families.toml")
_QUANTISED = re.compile(
    r"-(gptq(-int[48])?|awq|fp8(-dynamic)?|int[48]|[48]bit|bnb-[48]bit|quantized\.w\w+|nvfp4)$"
)


@dataclass(frozen=True, slots=True)
class SizedModel:
    """A model that may draft, with its size in the unit of the target's size."""

    name: str
    size: float
    origin: str
    """Where the candidate was found, in words."""


@dataclass(frozen=True, slots=True)
class DrafterChoice:
    """The drafter that was chosen, and why."""

    drafter: str
    """A folder or an id; empty: lookup drafts alone."""
    why: str
    passed_over: tuple[tuple[str, str], ...] = ()
    """Earlier candidates that cannot draft, each with the reason."""


def listed_siblings(target: str) -> list[SizedModel]:
    """Models of the target's family in the table that are small enough for it, smallest first.

    The table is searched for the last part of the target's id or folder, without marks of quantisation.
    """
    wanted = _bare(target)
    for family, models in _families().items():
        sizes = {_bare(name): size for name, size in models.items()}
        if wanted in sizes:
            origin = f"the smallest model of the family {family}"
            return _small([SizedModel(name, size, origin) for name, size in models.items()], sizes[wanted])
    return []


def cached_siblings(cached: Iterable[tuple[str, int]], target_size: int) -> list[SizedModel]:
    """Models of this machine that are small enough, smallest first; sizes are bytes of weights."""
    origin = "the smallest model on this machine that has the target's tokenizer"
    return _small([SizedModel(name, size, origin) for name, size in cached], target_size)


def choose_drafter(models: Sequence[SizedModel], refusal: Callable[[str], str]) -> DrafterChoice:
    """The first model that can draft for the target.

    Args:
        refusal: gives the reason why a model cannot be used; empty if it can.
    """
    passed_over: list[tuple[str, str]] = []
    for model in models:
        why = refusal(model.name)
        if not why:
            return DrafterChoice(model.name, model.origin, tuple(passed_over))
        passed_over.append((model.name, why))
    why = "no smaller model of the target's tokenizer is known here"
    return DrafterChoice("", f"{why}: lookup drafts alone", tuple(passed_over))


def _small(models: Sequence[SizedModel], target_size: float) -> list[SizedModel]:
    found = [model for model in models if 0 < model.size <= LARGEST_SHARE * target_size]
    return sorted(found, key=lambda model: (model.size, model.name))


def _bare(name: str) -> str:
    """The last part of an id or folder without revision and quantisation, in lower case."""
    last = name.rstrip("/").rpartition("/")[2].partition("@")[0].lower()
    return _QUANTISED.sub("", last)


@cache
def _families() -> dict[str, dict[str, float]]:
    return tomllib.loads(TABLE.read_text(encoding="utf-8"))
