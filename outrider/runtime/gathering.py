"""Puts together what a role is told: flags over variables over its table of the configuration file.

Nothing unknown passes at any level, and everything that is wrong is found at once. Of each value it is known
where it was given.
"""

import os
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
"""What only the start of a process can say."""
_ALL_IN_ALL: names.Path = ()
Origin = Callable[[names.Path], str]


@dataclass(slots=True)
class Told:
    """Values that a role was given, not yet checked, and where."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[names.Path, str] = field(default_factory=dict)
    """By path: a flag, a variable, or the configuration file."""
    problems: list[Problem] = field(default_factory=list)
    file: ConfigFile | None = None
    """The configuration file, where one was named."""
    misread: bool = False
    """Whether flags were left out, so that nothing can be said to be missing."""

    def origin(self, path: Sequence[Any]) -> str:
        """Where a value, or what it is part of, was given; empty where nowhere."""
        return next((self.origins[part] for part in _from_whole(path) if part in self.origins), "")

    def has(self, path: Sequence[Any]) -> bool:
        """Whether somebody said it, what it is part of, or the file that holds it."""
        return any(
            part in self.origins or (*part[:-1], f"{part[-1]}{SUFFIX}") in self.origins
            for part in _from_whole(path)
        )


def _from_whole(path: Sequence[Any]) -> Iterator[names.Path]:
    """It and what it is part of, the nearest first."""
    return (tuple(path[:length]) for length in range(len(path), 0, -1))


def gather(
    role: str,
    kind: type[BaseSettings],
    arguments: Sequence[str],
    environment: Mapping[str, str] | None = None,
) -> Told:
    """Reads flags, variables and the configuration file. Exits where help is asked for.

    Raises ValueError where flags cannot be parsed or a file cannot be read; other faults are `problems`.
    """
    environment = os.environ if environment is None else environment
    told = Told()
    flags = _flags(role, kind, arguments, told)
    given = _variables(role, kind, environment, told)
    path = flags.get("config") or given.get("config") or environment.get(names.CONFIG_VARIABLE)
    if path:
        told.file = ConfigFile.read(Path(path))
        told.problems += told.file.problems()
        take_table(kind, told, told.file.table(role), str(path))
    known = {name.upper(): name for name in environment}
    _lay(kind, told, given, lambda path: known.get(names.variable(role, path), names.variable(role, path)))
    _lay(kind, told, flags, names.flag)
    return told


def take_table(kind: type[BaseModel], told: Told, table: Mapping[str, Any], origin: str) -> None:
    """Lays a file's table over what was told. What it has no settings for is left out, and is a problem."""
    kept = _known_keys(kind, table, _ALL_IN_ALL, origin, told.problems)
    for name in sorted(kept.keys() & set(NOT_IN_FILES)):
        del kept[name]
        told.problems.append(Problem(name, "is for flags and variables, not for a file", origin=origin))
    _lay(kind, told, kept, lambda _: origin)


def check(kind: type[BaseModel], told: Told) -> BaseModel | None:
    """The settings, where what was told makes them; whatever does not goes to its problems."""
    made, found = None, list[Problem]()
    try:
        made = kind(**told.values)
    except ValidationError as error:
        found = [_problem(kind, told, fault) for fault in error.errors(include_url=False)]
    if isinstance(made, SecretFiles):
        found = [Problem("", what, missing=True) for what in made.incomplete()]
    found += _halves(kind, told)
    told.problems += (one for one in found if not (one.missing and told.misread))
    return made


def _halves(kind: type[BaseModel], told: Told) -> Iterator[Problem]:
    """Settings that go together, some of which are missing: known even where others make no settings."""
    if not issubclass(kind, SecretFiles) or told.misread:
        return
    for group in kind.together:
        if (problem := group.problem(told.values)) is not None:
            yield replace(problem, origin=told.origin((problem.path,)))


def unknown_variables(role: str, kind: type[BaseModel], environment: Mapping[str, str]) -> Iterator[Problem]:
    """Variables that look like settings of this role, or of none at all, and are none."""
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
    """Of this role's; or where the name is of no role, the same of the role that is nearest."""
    if name.startswith(names.env_prefix(role)):
        return names.did_you_mean(name, known)
    begin, between, rest = name.partition("__")
    prefixes = [names.env_prefix(table) for table in names.TABLES]
    near = names.nearest(begin + between, prefixes)
    return f"did you mean {near}{rest}?" if near else f"they begin with {', '.join(prefixes)}"


def _with_two_underscores(name: str, role: str) -> str:
    """Kubernetes gives every pod OUTRIDER_VERIFIER_PORT and the like, so that not all of these are slips."""
    begin = names.env_prefix(role).removesuffix("_")
    return names.env_prefix(role) + name.removeprefix(begin) if name.startswith(begin) else ""


def _flags(role: str, kind: type[BaseSettings], arguments: Sequence[str], told: Told) -> dict[str, Any]:
    source: CliSettingsSource[Any] = CliSettingsSource(
        kind, cli_prog_name=f"outrider serve {role}", cli_exit_on_error=False
    )
    known = source.root_parser._option_string_actions
    wrong = [name for name in _named_flags(arguments) if name not in known]
    if wrong and not {"-h", "--help"} & set(arguments):
        told.problems += (Problem(name, f"is no flag; {names.did_you_mean(name, known)}") for name in wrong)
        told.misread = True
        return {}
    try:
        source(args=list(arguments))
        values: dict[str, Any] = source()
    except SettingsError as error:
        said = str(error).removeprefix("error parsing CLI: ")
        rest = said.removeprefix("unrecognized arguments: ")
        raise ValueError(said if rest == said else f"{rest!r} belongs to no flag") from error
    return values


def _named_flags(arguments: Sequence[str]) -> Iterator[str]:
    for argument in arguments:
        if argument.startswith("--"):
            yield argument.partition("=")[0]


def _variables(
    role: str, kind: type[BaseSettings], environment: Mapping[str, str], told: Told
) -> dict[str, Any]:
    told.problems += unknown_variables(role, kind, environment)
    source = EnvSettingsSource(kind)
    source.env_vars = {name.lower(): value for name, value in environment.items()}
    try:
        values: dict[str, Any] = source()
    except SettingsError as error:
        name = str(error).partition('"')[2].partition('"')[0]
        raise ValueError(
            f"{names.variable(role, (name,))} is no JSON, which a whole group is said in"
        ) from error
    problems: list[Problem] = []
    known = _known_keys(kind, values, _ALL_IN_ALL, "a variable", problems)
    # Those that are variables of their own are told already, by their whole names.
    upper = {name.upper() for name in environment}
    told.problems += (
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


def _lay(kind: type[BaseModel], told: Told, values: Mapping[str, Any], origin: Origin) -> None:
    told.values = _over(kind, told.values, values)
    for path in _leaves(values, kind):
        told.origins[path] = origin(path)
    present = set(_leaves(told.values, kind))
    told.origins = {path: given for path, given in told.origins.items() if path in present}


def _over(kind: type[BaseModel], below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """A secret and the file that holds it are one setting: whichever is given higher up counts."""
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


def _problem(kind: type[BaseModel], told: Told, fault: Mapping[str, Any]) -> Problem:
    place, what = fault["loc"], fault["msg"].removeprefix("Value error, ")
    path = ".".join(part for part in place if isinstance(part, str))
    if fault["type"] == "missing":
        role = getattr(kind, "role", "")
        say = f"is missing: give {names.flag(place)}, {names.variable(role, place)} or {path} below [{role}]"
        return Problem(path, say, missing=True)
    if place and not told.has(place):
        return Problem(path, what, missing=True)  # its default will not do: somebody has to say it
    given = fault["input"]
    secret = any(
        place[: len(setting.path)] == setting.path and holds_secret(setting.field.annotation)
        for setting in names.settings_of(kind)
    )
    shown = not secret and not isinstance(given, Mapping | SecretStr) and place
    return Problem(path, what, repr(given) if shown else None, told.origin(place))
