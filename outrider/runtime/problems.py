"""Problems with settings, each with the setting's path, its value and what to do."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault in the settings that were given."""

    path: str
    """Name of the setting, variable, flag or table."""
    what: str
    """What is wrong with the setting, and what to do."""
    value: str | None = None
    """The value as it was given; None where there is no value, or where it is secret."""
    origin: str = ""
    """Where the value was given: a flag, a variable or a file."""
    missing: bool = False
    """Whether the setting is only not given yet."""

    def __str__(self) -> str:
        if not self.path:
            return self.what
        path = self.path if self.path.isprintable() else repr(self.path)
        given = path if self.value is None else f"{path} = {self.value}"
        if self.origin:
            given += f" ({self.origin})"
        sentence = given == path and self.what.startswith(("is ", "stands "))
        return f"{given} {self.what}" if sentence else f"{given}: {self.what}"

    def as_object(self) -> dict[str, Any]:
        """The problem as JSON prints it."""
        return {"path": self.path, "value": self.value, "origin": self.origin, "what": self.what}


@dataclass(frozen=True, slots=True)
class Together:
    """Settings that are valid only together: none may be given before all `needed` settings are."""

    needed: tuple[str, ...]
    more: tuple[str, ...] = ()
    """Further settings that need the `needed` ones."""

    def problem(self, values: Mapping[str, Any]) -> Problem | None:
        """The problem where some of these values (by name) are given and a needed one is missing, or None."""
        given = [name for name in (*self.needed, *self.more) if values.get(name) not in (None, "")]
        missing = " and ".join(name for name in self.needed if name not in given)
        if not given or not missing:
            return None
        what = f"is given without {missing}: give {missing} too, or leave {' and '.join(given)} out"
        return Problem(given[0], what, repr(str(values[given[0]])))


class WrongSettings(ValueError):
    """Settings cannot be used; `problems` lists every fault."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("; ".join(str(problem) for problem in problems))
        self.problems = problems
