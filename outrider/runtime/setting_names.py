"""What settings are called: their paths, flags and variables, and which known name is nearest to a wrong one.

Knows nothing of values or of where they come from.
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
"""What a configuration file may have tables for, and variables may be of."""
PREFIX = "OUTRIDER_"
CONFIG_VARIABLE = f"{PREFIX}CONFIG"
"""Names the configuration file of whoever is not told another one."""

NEAR, VERY_NEAR = 0.6, 0.9
"""How alike two names are, from 0 to 1, for one to be offered for the other; and to be taken for it."""

Path = tuple[str, ...]
"""A setting's name below those of the groups that it is in."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One that takes a value itself; groups do not."""

    path: Path
    field: FieldInfo

    @property
    def dotted(self) -> str:
        """As a configuration file's table and messages name it."""
        return ".".join(self.path)


def settings_of(kind: type[BaseModel], above: Path = ()) -> Iterator[Setting]:
    """All of a class, those of its groups included, in order."""
    for name, field in kind.model_fields.items():
        group = group_of(kind, name)
        if group is None:
            yield Setting((*above, name), field)
        else:
            yield from settings_of(group, (*above, name))


def group_of(kind: type[BaseModel], name: str) -> type[BaseModel] | None:
    """The class of a field that is a group of settings; None of any other name."""
    field = kind.model_fields.get(name)
    return None if field is None else next(_models(field.annotation), None)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) in (Union, UnionType):
        for part in get_args(annotation):
            yield from _models(part)


def env_prefix(role: str) -> str:
    """What a role's variables begin with."""
    return f"{PREFIX}{role.upper()}__"


def variable(role: str, path: Path) -> str:
    """A setting as a variable of the environment."""
    return env_prefix(role) + "__".join(path).upper()


def flag(path: Path) -> str:
    """A setting as a flag."""
    return "--" + ".".join(path).replace("_", "-")


def variables(role: str, kind: type[BaseModel]) -> Iterator[str]:
    """All that are read, those that give a whole group as JSON included."""
    for setting in settings_of(kind):
        for length in range(1, len(setting.path) + 1):
            yield variable(role, setting.path[:length])


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that is most like this one; empty where none is."""
    names = {one.lower(): one for one in sorted(known)}
    near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=NEAR)
    return names[near[0]] if near else ""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about a name that is none: the nearest that is, else all there are."""
    names = sorted(known)
    near = nearest(name, names)
    return f"did you mean {near}?" if near else f"there are: {', '.join(names)}"


def close_to(name: str, other: str) -> bool:
    """Whether a name is likely to be another one misspelt."""
    return difflib.SequenceMatcher(None, name, other).ratio() > VERY_NEAR
