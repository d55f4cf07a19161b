"""Names of settings: their paths, flags and variables, and the known name nearest to a misspelt one.

This module knows nothing of values or of where they come from.
"""

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

ROLES = ("orchestrator", "verifier", "drafter", "retrieval")
TABLES = (*ROLES, "up")
"""Names of a configuration file's tables, which variables begin with too."""
PREFIX = "OUTRIDER_"
CONFIG_VARIABLE = f"{PREFIX}CONFIG"
"""Variable that names the configuration file of processes without `--config`."""

NEAR, VERY_NEAR = 0.6, 0.9
"""Similarity of two names, 0 to 1, from which an unknown name is answered with "did you mean", and from which
a variable without a role counts as misspelt."""

Path = tuple[str, ...]
"""A setting's name, after the names of the groups around it."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting that takes a value itself, not a group of settings."""

    path: Path
    field: FieldInfo

    @property
    def dotted(self) -> str:
        """The setting's name in a configuration file and in messages, such as `group.name`."""
        return ".".join(self.path)


def settings_of(kind: type[BaseModel], above: Path = ()) -> Iterator[Setting]:
    """All settings of a class in order, those of its groups included."""
    for name, field in kind.model_fields.items():
        group = group_of(kind, name)
        if group is None:
            yield Setting((*above, name), field)
        else:
            yield from settings_of(group, (*above, name))


def group_of(kind: type[BaseModel], name: str) -> type[BaseModel] | None:
    """The class of a field that is a group of settings; None for any other name."""
    field = kind.model_fields.get(name)
    return None if field is None else next(_models(field.annotation), None)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) in (Union, UnionType):
        for part in get_args(annotation):
            yield from _models(part)


def env_prefix(role: str) -> str:
    """The prefix of a role's variables."""
    return f"{PREFIX}{role.upper()}__"


def variable(role: str, path: Path) -> str:
    """Name of a setting's environment variable."""
    return env_prefix(role) + "__".join(path).upper()


def flag(path: Path) -> str:
    """Name of a setting's flag, with its dashes."""
    return "--" + ".".join(path).replace("_", "-")


def variables(role: str, kind: type[BaseModel]) -> Iterator[str]:
    """Names of all variables that a role reads, those for a whole group as JSON included."""
    for setting in settings_of(kind):
        for length in range(1, len(setting.path) + 1):
            yield variable(role, setting.path[:length])


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that is most similar to this name; empty where none is similar enough."""
    names = {one.lower(): one for one in sorted(known)}
    near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=NEAR)
    return names[near[0]] if near else ""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the nearest known name, else all known names."""
    names = sorted(known)
    near = nearest(name, names)
    return f"did you mean {near}?" if near else f"there are: {', '.join(names)}"


def close_to(name: str, other: str) -> bool:
    """Whether a name is probably a misspelling of the other name."""
    return difflib.SequenceMatcher(None, name, other).ratio() > VERY_NEAR
