"""Collects a role's settings: flags over variables over the role's table of the configuration file.

Unknown names are refused at every level, and all problems are found at once. Each value keeps its origin.
"""

import os
from argparse import Action, ArgumentParser
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, SecretStr, ValidationError
from pydantic_settings import BaseSettings, CliSettingsSource, EnvSettingsSource, SettingsError

from outrider.runtime import setting_names as names
from outrider.runtime.config_file import ConfigFile
from outrider.runtime.problems import Problem
from outrider.runtime.secret_files import SUFFIX, SecretFiles, holds_secret, rival

NOT_IN_FILES = ("config", "parent_pid")
"""Settings that only flags and variables can set."""
_ALL_IN_ALL: names.Path = ()
Origin = Callable[[names.Path], str]


@dataclass(slots=True)
class GivenSettings:
    """A role's settings as given, not yet checked, with the origin of each."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[names.Path, str] = field(default_factory=dict)
    """Setting's path to its origin: a flag, a variable, or the configuration file."""
    problems: list[Problem] = field(default_factory=list)
    file: ConfigFile | None = None
    """The configuration file, where one was given."""
    misread: bool = False
    """Whether flags could not be read; a setting that seems missing may be among them."""

    def origin(self, path: Sequence[Any]) -> str:
        """Origin of a value, or of the group that holds it; empty where it was not given."""
        return next((self.origins[part] for part in _from_whole(path) if part in self.origins), "")

    def has(self, path: Sequence[Any]) -> bool:
        """Whether a setting was given, itself, by its group, or by its secret file."""
        return any(
            part in self.origins or (*part[:-1], f"{part[-1]}{SUFFIX}") in self.origins
            for part in _from_whole(path)
        )


def _from_whole(path: Sequence[Any]) -> Iterator[names.Path]:
    """The path and those of the groups around it, the nearest first."""
    return (tuple(path[:length]) for length in range(len(path), 0, -1))


def gather(
    role: str,
    kind: type[BaseSettings],
    arguments: Sequence[str],
    environment: Mapping[str, str] | None = None,
) -> GivenSettings:
    """Reads flags, variables and the configuration file. Exits where a flag requests help.

    Raises ValueError where flags cannot be parsed or a file cannot be read; other faults are `problems`.
    """
    environment = os.environ if environment is None else environment
    given = GivenSettings()
    flags = _flags(role, kind, arguments, given)
    variables = _variables(role, kind, environment, given)
    path = flags.get("config") or variables.get("config") or environment.get(names.CONFIG_VARIABLE)
    if path:
        given.file = ConfigFile.read(Path(path))
        given.problems += given.file.problems()
        take_table(kind, given, given.file.table(role), str(path))
    known = {name.upper(): name for name in environment}

    def as_written(path: names.Path) -> str:
        return known.get(name := names.variable(role, path), name)

    _lay(kind, given, variables, as_written)
    _lay(kind, given, flags, names.flag)
    return given


def take_table(kind: type[BaseModel], given: GivenSettings, table: Mapping[str, Any], origin: str) -> None:
    """Adds a file's table to the given settings. Names that are no settings become problems."""
    kept = _known_keys(kind, table, _ALL_IN_ALL, origin, given.problems)
    for name in sorted(kept.keys() & set(NOT_IN_FILES)):
        del kept[name]
        given.problems.append(Problem(name, "is for flags and variables, not for a file", origin=origin))
    _lay(kind, given, kept, lambda _: origin)


def check(kind: type[BaseModel], given: GivenSettings) -> BaseModel | None:
    """The settings as a checked object; None where they are wrong. Adds to the problems of `given`."""
    made, found = None, list[Problem]()
    try:
        made = kind(**given.values)
    except ValidationError as error:
        found = [_problem(kind, given, fault) for fault in error.errors(include_url=False)]
    if isinstance(made, SecretFiles):
        found = [Problem("", what, missing=True) for what in made.incomplete()]
    found += _halves(kind, given)
    given.problems += (one for one in found if not (one.missing and given.misread))
    return made


def _halves(kind: type[BaseModel], given: GivenSettings) -> Iterator[Problem]:
    """Problems of settings that go together where some are missing, even if other settings are wrong."""
    if not issubclass(kind, SecretFiles) or given.misread:
        return
    for group in kind.together:
        if (problem := group.problem(given.values)) is not None:
            yield replace(problem, origin=given.origin((problem.path,)))


def unknown_variables(role: str, kind: type[BaseModel], environment: Mapping[str, str]) -> Iterator[Problem]:
    """Problems of variables that look like settings of this role or of no role, and are not settings."""
    known = set(names.variables(role, kind))
    others = tuple(names.env_prefix(other) for other in names.TABLES if other != role)
    for name in sorted(environment):
        upper = name.upper()
        if not upper.startswith(names.PREFIX) or upper in known or upper.startswith(others):
            continue
        if "__" in upper:
            yield Problem(name, f"is no setting; {_nearest_variable(upper, role, known)}")
        elif (meant := _with_two_underscores(upper, role)) in known:
            yield Problem(name, f"is no setting; did you mean {meant}, with two underscores?")
        elif upper != names.CONFIG_VARIABLE and names.close_to(upper, names.CONFIG_VARIABLE):
            yield Problem(name, f"is not read; did you mean {names.CONFIG_VARIABLE}?")


def _nearest_variable(name: str, role: str, known: set[str]) -> str:
    """Advice for an unknown name: a variable of this role, or the same variable of the nearest role."""
    if name.startswith(names.env_prefix(role)):
        return names.did_you_mean(name, known)
    begin, between, rest = name.partition("__")
    prefixes = [names.env_prefix(table) for table in names.TABLES]
    near = names.nearest(begin + between, prefixes)
    return f"did you mean {near}{rest}?" if near else f"they begin with {', '.join(prefixes)}"


def _with_two_underscores(name: str, role: str) -> str:
    """The variable that a name with one underscore may mean; empty where it cannot be of this role.

    Kubernetes gives every pod OUTRIDER_VERIFIER_PORT and the like, so not every such name is a slip.
    """
    begin = names.env_prefix(role).removesuffix("_")
    return names.env_prefix(role) + name.removeprefix(begin) if name.startswith(begin) else ""


def _flags(
    role: str, kind: type[BaseSettings], arguments: Sequence[str], given: GivenSettings
) -> dict[str, Any]:
    known: set[str] = set()

    def add(parser: ArgumentParser, *flags: str, **options: Any) -> Action:
        action = parser.add_argument(*flags, **options)
        known.update(action.option_strings)
        return action

    source: CliSettingsSource[Any] = CliSettingsSource(
        kind, cli_prog_name=f"outrider serve {role}", cli_exit_on_error=False, add_argument_method=add
    )
    wrong = [name for name in _named_flags(arguments) if name not in known]
    if wrong and not {"-h", "--help"} & set(arguments):
        given.problems += (Problem(name, f"is no flag; {names.did_you_mean(name, known)}") for name in wrong)
        given.misread = True
        return {}
    try:
        source(args=list(arguments))
        values: dict[str, Any] = source()
    except SettingsError as error:
        message = str(error).removeprefix("error parsing CLI: ")
        rest = message.removeprefix("unrecognized arguments: ")
        raise ValueError(message if rest == message else f"{rest!r} belongs to no flag") from error
    return values


def _named_flags(arguments: Sequence[str]) -> Iterator[str]:
    for argument in arguments:
        if argument.startswith("--"):
            yield argument.partition("=")[0]


def _variables(
    role: str, kind: type[BaseSettings], environment: Mapping[str, str], given: GivenSettings
) -> dict[str, Any]:
    given.problems += unknown_variables(role, kind, environment)
    source = EnvSettingsSource(kind)
    source.env_vars = {name.lower(): value for name, value in environment.items()}
    try:
        values: dict[str, Any] = source()
    except SettingsError as error:
        name = str(error).partition('"')[2].partition('"')[0]
        raise ValueError(
            f"{names.variable(role, (name,))} is no JSON, in which a whole group is given"
        ) from error
    problems: list[Problem] = []
    known = _known_keys(kind, values, _ALL_IN_ALL, "a variable", problems)
    # Those that are variables of their own are reported already, by their whole names.
    upper = {name.upper() for name in environment}
    given.problems += (
        one for one in problems if names.variable(role, tuple(one.path.split("."))) not in upper
    )
    return known


def _known_keys(
    kind: type[BaseModel], table: Mapping[str, Any], above: names.Path, origin: str, problems: list[Problem]
) -> dict[str, Any]:
    kept = {}
    for name, value in table.items():
        group = names.group_of(kind, name)
        dotted = ".".join((*above, name))
        if name not in kind.model_fields:
            what = f"is no setting; {names.did_you_mean(name, kind.model_fields)}"
            problems.append(Problem(dotted, what, origin=origin))
        elif group is not None and isinstance(value, Mapping):
            kept[name] = _known_keys(group, value, (*above, name), origin, problems)
        else:
            kept[name] = value
    return kept


def _lay(kind: type[BaseModel], given: GivenSettings, values: Mapping[str, Any], origin: Origin) -> None:
    given.values = _over(kind, given.values, values)
    for path in _leaves(values, kind):
        given.origins[path] = origin(path)
    present = set(_leaves(given.values, kind))
    given.origins = {path: where for path, where in given.origins.items() if path in present}


def _over(kind: type[BaseModel], below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Values of both, those of `above` first. A secret and its file are one setting."""
    rivals = {rival(kind, name) for name in above}
    merged = {name: value for name, value in below.items() if name not in rivals}
    for name, value in above.items():
        group, lower = names.group_of(kind, name), merged.get(name)
        if group is not None and isinstance(value, Mapping) and isinstance(lower, Mapping):
            merged[name] = _over(group, lower, value)
        else:
            merged[name] = value
    return merged


def _leaves(values: Mapping[str, Any], kind: type[BaseModel], above: names.Path = ()) -> Iterator[names.Path]:
    for name, value in values.items():
        group = names.group_of(kind, name)
        if group is not None and isinstance(value, Mapping):
            yield from _leaves(value, group, (*above, name))
        else:
            yield (*above, name)


def _problem(kind: type[BaseModel], given: GivenSettings, fault: Mapping[str, Any]) -> Problem:
    place, what = fault["loc"], fault["msg"].removeprefix("Value error, ")
    path = ".".join(part for part in place if isinstance(part, str))
    if fault["type"] == "missing":
        role = getattr(kind, "role", "")
        say = f"is missing: give {names.flag(place)}, {names.variable(role, place)} or {path} below [{role}]"
        return Problem(path, say, missing=True)
    if place and not given.has(place):
        return Problem(path, what, missing=True)  # the default is invalid here: the setting must be given
    value = fault["input"]
    secret = any(
        place[: len(setting.path)] == setting.path and holds_secret(setting.field.annotation)
        for setting in names.settings_of(kind)
    )
    shown = not secret and not isinstance(value, Mapping | SecretStr) and place
    return Problem(path, what, repr(value) if shown else None, given.origin(place))
