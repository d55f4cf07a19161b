"""What is wrong with settings, each with its path, its value and what to do."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with what was told."""

    path: str
    """Which setting, variable, flag or table."""
    what: str
    """What is wrong with it, and what to do."""
    value: str | None = None
    """As it was given; None where there is none, or none that may be shown."""
    origin: str = ""
    """Where it was given: a flag, a variable, a file."""
    missing: bool = False
    """Whether it is only that nobody has said it yet."""

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
        """For JSON."""
        return {"path": self.path, "value": self.value, "origin": self.origin, "what": self.what}


@dataclass(frozen=True, slots=True)
class Together:
    """Settings none of which makes sense before all that are needed are given."""

    needed: tuple[str, ...]
    more: tuple[str, ...] = ()
    """Others that need them."""

    def problem(self, values: Mapping[str, Any]) -> Problem | None:
        """What is wrong with these values by name, where some are given and others are missing."""
        given = [name for name in (*self.needed, *self.more) if values.get(name) not in (None, "")]
        missing = " and ".join(name for name in self.needed if name not in given)
        if not given or not missing:
            return None
        what = f"is given without {missing}: give {missing} too, or leave {' and '.join(given)} out"
        return Problem(given[0], what, repr(str(values[given[0]])))


class WrongSettings(ValueError):
    """Settings that cannot be used, with everything that is wrong with them."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("; ".join(str(problem) for problem in problems))
        self.problems = problems
