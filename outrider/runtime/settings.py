"""Settings of a process: flags over OUTRIDER_<ROLE>__FIELD over defaults, and nothing unknown at any level.

Only a service's `__main__` reads them; everything below receives plain values.
"""

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict, SettingsError

from outrider.runtime.log import Format, Level

ROLES = ("orchestrator", "verifier", "drafter", "retrieval")
PREFIX = "OUTRIDER_"


class Group(BaseModel):
    """Base of nested settings: as strict as the settings themselves."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


def _split(value: Any) -> Any:
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if isinstance(value, list | tuple):
        return tuple(part for item in value for part in _split(item))
    return value


Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]
"""A list written as A,B."""

_ADDRESS = re.compile(r"(?:[^\s:]+|\[[0-9a-fA-F:]+\]):(\d{1,5})")
_HIGHEST_PORT = 65535


def _checked(address: str, lowest: int) -> str:
    found = _ADDRESS.fullmatch(address)
    if found is None or not lowest <= int(found[1]) <= _HIGHEST_PORT:
        raise ValueError(f"give host:port, the port from {lowest} to {_HIGHEST_PORT}")
    return address


Address = Annotated[str, AfterValidator(partial(_checked, lowest=0))]
"""host:port to serve on; port 0 picks a free one."""

DNS = "dns:"
"""What a peer begins with that is a name for as many addresses as it resolves to."""


def _checked_peer(peer: str) -> str:
    _checked(peer.removeprefix(DNS), lowest=1)
    return peer


Peers = Annotated[
    tuple[Annotated[str, AfterValidator(_checked_peer)], ...], NoDecode, BeforeValidator(_split)
]
"""Addresses to dial, written as A,B; dns:NAME:PORT is each address that the name has at the time."""


class ServiceSettings(BaseSettings):
    """What every process can be told. A service's own settings derive from it and name their `role`."""

    model_config = SettingsConfigDict(
        extra="forbid",
        frozen=True,
        env_nested_delimiter="__",
        use_attribute_docstrings=True,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        cli_hide_none_type=True,
    )
    role: ClassVar[str]

    bind: Address = "127.0.0.1:0"
    """Where to serve gRPC; port 0 picks a free one."""
    metrics_bind: Address = "127.0.0.1:0"
    """Where to serve /metrics, /healthz and /readyz over HTTP."""
    log_level: Level = "info"
    """The least severe events to log."""
    log_format: Format = "plain"
    """One event per line, as text or as a JSON object."""
    trace_endpoint: Annotated[str, Field(pattern=r"^https?://[^\s/]+:\d+/?$")] | None = None
    """Where spans of requests go, over OTLP: http://host:port of a collector. Default: nowhere."""
    trace_sample: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Of requests that come without a trace of their own, the share that is traced."""
    max_message_mb: Annotated[int, Field(ge=1, le=1024)] = 32
    """The largest message taken from a peer, in MiB."""
    grace_s: Annotated[float, Field(ge=0, le=3600)] = 2.0
    """How long calls in flight may go on after a signal to stop, in seconds."""
    parent_pid: int | None = None
    """End as soon as this process, which must be the parent, has ended."""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        cls.model_config["env_prefix"] = env_prefix(cls.role)


def env_prefix(role: str) -> str:
    """What a role's variables begin with."""
    return f"{PREFIX}{role.upper()}__"


Settings = TypeVar("Settings", bound=ServiceSettings)


def read_settings(
    kind: type[Settings], arguments: Sequence[str], environment: Mapping[str, str] | None = None
) -> Settings:
    """Reads flags and environment. Raises ValueError with every fault; an unknown flag exits with 2."""
    unknown = sorted(unknown_variables(kind, os.environ if environment is None else environment))
    if unknown:
        raise ValueError(
            f"no such setting: {', '.join(unknown)}; known: {', '.join(sorted(_variables(kind)))}"
        )
    try:
        return kind(_cli_parse_args=list(arguments), _cli_prog_name=f"outrider serve {kind.role}")
    except ValidationError as error:
        raise ValueError("; ".join(_fault(kind, fault) for fault in error.errors())) from error
    except SettingsError as error:
        raise ValueError(str(error)) from error


def settings_or_exit(kind: type[Settings], arguments: Sequence[str] | None = None) -> Settings:
    """For a `__main__`: tells a fault on standard error and, as JSON, on standard output; exits with 2."""
    try:
        return read_settings(kind, sys.argv[1:] if arguments is None else arguments)
    except ValueError as error:
        print(f"{kind.role}: {error}", file=sys.stderr)
        print(json.dumps({"error": {"code": "INVALID_ARGUMENT", "message": str(error)}}), flush=True)
        raise SystemExit(2) from error


def unknown_variables(kind: type[ServiceSettings], environment: Mapping[str, str]) -> Iterator[str]:
    """Variables that look like settings of this role, or of none at all, and are none."""
    known = {name.upper() for name in _variables(kind)}
    others = tuple(env_prefix(role) for role in ROLES if role != kind.role)
    for name in environment:
        upper = name.upper()
        if upper.startswith(PREFIX) and "__" in upper and not upper.startswith(others) and upper not in known:
            yield name


def _variables(kind: type[BaseModel], prefix: str | None = None) -> Iterator[str]:
    if prefix is None:
        assert issubclass(kind, ServiceSettings)
        prefix = env_prefix(kind.role)
    for name, field in kind.model_fields.items():
        yield f"{prefix}{name.upper()}"
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _variables(field.annotation, f"{prefix}{name.upper()}__")


def _fault(kind: type[ServiceSettings], fault: Mapping[str, Any]) -> str:
    where = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "missing":
        flag = where.replace("_", "-")
        return (
            f"{where} is missing: give --{flag} or {env_prefix(kind.role)}{where.upper().replace('.', '__')}"
        )
    return f"{where} = {fault['input']!r}: {fault['msg'].removeprefix('Value error, ')}"
