"""Checks of `outrider config`: the settings in a file, and the settings of one role with their origins.

The only module that knows the settings of every role.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from drafter_service.settings import DrafterSettings
from orchestrator.settings import OrchestratorSettings
from outrider.cli.local.up_settings import UpSettings
from outrider.runtime.config_file import ConfigFile
from outrider.runtime.problems import Problem
from outrider.runtime.secret_files import MASK, SUFFIX, holds_secret
from outrider.runtime.setting_names import Setting, settings_of
from outrider.runtime.settings import RoleSettings
from outrider.runtime.settings_sources import GivenSettings, check, gather, take_table
from retrieval_service.settings import RetrievalSettings
from verifier_service.settings import VerifierSettings

MISSING = "(missing)"


def kinds() -> dict[str, type[RoleSettings]]:
    """Settings class of every role, and of `up`, by name."""
    found = (OrchestratorSettings, VerifierSettings, DrafterSettings, RetrievalSettings, UpSettings)
    return {kind.role: kind for kind in found}


@dataclass(frozen=True, slots=True)
class Checked:
    """Problems of a file, and settings that it leaves to flags and variables."""

    path: Path
    problems: Sequence[Problem]
    left: Sequence[Problem]
    """Settings that a role needs and the file does not give: not a fault of the file."""

    def lines(self) -> Iterator[str]:
        """The result as lines to print."""
        yield from map(str, self.problems)
        for problem in self.left:
            yield f"left open: {problem}"
        count = len(self.problems)
        yield f"{self.path}: {count} problem{'s' * (count != 1)}" if count else f"{self.path}: right"

    def as_object(self) -> dict[str, Any]:
        """The result as an object to print as JSON."""
        found = {"file": str(self.path), "ok": not self.problems}
        problems = [problem.as_object() for problem in self.problems]
        return found | {"problems": problems, "left": [problem.as_object() for problem in self.left]}


def check_file(path: Path) -> Checked:
    """Reads every table as its role would. Raises ValueError where the file cannot be read as TOML."""
    file = ConfigFile.read(path)
    found = list(file.problems())
    for role, kind in kinds().items():
        if not file.table(role):
            continue
        given = GivenSettings()
        take_table(kind, given, file.table(role), "")
        check(kind, given)
        found += (
            replace(one, path=f"{role}.{one.path}" if one.path else f"[{role}]") for one in given.problems
        )
    return Checked(path, [one for one in found if not one.missing], [one for one in found if one.missing])


@dataclass(frozen=True, slots=True)
class Row:
    """One setting's value and origin."""

    path: str
    value: Any
    """The value as JSON has it; secrets are masked."""
    origin: str


@dataclass(frozen=True, slots=True)
class Shown:
    """A role's settings, and the problems that keep it from starting with them."""

    role: str
    rows: Sequence[Row]
    problems: Sequence[Problem]

    def lines(self) -> Iterator[str]:
        """Lines to print: a table, then the problems."""
        cells = [(row.path, _in_words(row.value), row.origin) for row in self.rows]
        wide, high = (max(len(cell[column]) for cell in cells) for column in (0, 1))
        for path, value, origin in cells:
            yield f"{path:<{wide}}  {value:<{min(high, 48)}}  {origin}"
        for problem in self.problems:
            yield f"wrong: {problem}"

    def as_object(self) -> dict[str, Any]:
        """The settings as an object to print as JSON."""
        settings = {row.path: {"value": row.value, "from": row.origin} for row in self.rows}
        problems = [problem.as_object() for problem in self.problems]
        return {"role": self.role, "settings": settings, "problems": problems}


def show(role: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> Shown:
    """A role's settings as it would read them. Raises ValueError where flags or a file cannot be read."""
    kind = kinds()[role]
    given = gather(role, kind, arguments, environment)
    settings = check(kind, given)
    values = given.values if settings is None else settings.model_dump(mode="json")
    rows = [_row(setting, given, values, settings is not None) for setting in settings_of(kind)]
    return Shown(role, rows, given.problems)


def _row(setting: Setting, given: GivenSettings, values: Mapping[str, Any], checked: bool) -> Row:
    field, origin = setting.field, given.origin(setting.path)
    found: Any = values
    for name in setting.path:
        found = found.get(name) if isinstance(found, Mapping) else None
    if not origin and field.is_required():
        return Row(setting.dotted, MISSING, _of_secret_file(setting, given))
    if not origin and not checked and field.default_factory is None:
        found = field.default
    if holds_secret(field.annotation):
        return Row(setting.dotted, None if found is None else MASK, origin or _of_secret_file(setting, given))
    by_default = "default" if field.default_factory is None else "this machine"
    return Row(setting.dotted, found, origin or by_default)


def _of_secret_file(setting: Setting, given: GivenSettings) -> str:
    file = given.origin((*setting.path[:-1], setting.path[-1] + SUFFIX))
    return f"the file of {file}" if file else "default"


def _in_words(value: Any) -> str:
    if value in (None, "", [], ()):
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
