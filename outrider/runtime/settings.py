"""Settings of a process: flags over OUTRIDER_<ROLE>__FIELD over the role's table of one configuration file.

Nothing unknown passes at any level. Only a service's `__main__` reads them; everything below receives plain
values, and a class of settings that is called takes what it is given and nothing else.
"""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, SecretStr
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from outrider.runtime import setting_names as names
from outrider.runtime.gathering import check, gather
from outrider.runtime.log import Format, Level
from outrider.runtime.problems import Together, Wrong
from outrider.runtime.secret_files import SUFFIX, SecretFiles


class Group(SecretFiles):
    """Base of nested settings: as strict as the settings themselves."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, hide_input_in_errors=True
    )


def _split(value: Any) -> Any:
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if isinstance(value, list | tuple):
        return tuple(part for item in value for part in _split(item))
    return value


Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]
"""A list written as A,B."""

Secrets = Annotated[tuple[SecretStr, ...], NoDecode, BeforeValidator(_split)]
"""The same of what must not be shown."""


def _named(path: Any) -> Any:
    return None if path == "" else path


File = Annotated[Path | None, BeforeValidator(_named)]
"""A file's path; an empty one is none, as variables are that a compose file passes on and nobody has set."""

_ADDRESS = re.compile(r"(?:[^\s:]+|\[[0-9a-fA-F:]+\]):(\d{1,5})")
_HIGHEST_PORT = 65535


def checked_address(address: str, lowest: int) -> str:
    found = _ADDRESS.fullmatch(address)
    if found is None or not lowest <= int(found[1]) <= _HIGHEST_PORT:
        raise ValueError(f"give host:port, the port from {lowest} to {_HIGHEST_PORT}")
    return address


Address = Annotated[str, AfterValidator(partial(checked_address, lowest=0))]
"""host:port to serve on; port 0 picks a free one."""

TLS = Together(("tls_cert", "tls_key", "tls_ca"))
DNS = "dns:"
"""What a peer begins with that is a name for as many addresses as it resolves to."""


def _checked_peer(peer: str) -> str:
    checked_address(peer.removeprefix(DNS), lowest=1)
    return peer


Peers = Annotated[
    tuple[Annotated[str, AfterValidator(_checked_peer)], ...], NoDecode, BeforeValidator(_split)
]
"""Addresses to dial, written as A,B; dns:NAME:PORT is each address that the name has at the time."""


class RoleSettings(SecretFiles, BaseSettings):
    """What all that have a table in the configuration file share; a class of settings names its `role`."""

    model_config = SettingsConfigDict(
        extra="forbid",
        frozen=True,
        env_nested_delimiter="__",
        use_attribute_docstrings=True,
        hide_input_in_errors=True,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        cli_hide_none_type=True,
    )
    role: ClassVar[str]

    config: Path | None = None
    """A TOML file with a table per role, which counts below variables and flags. Default: the one that
    OUTRIDER_CONFIG names, if any."""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        if hasattr(cls, "role"):
            cls.model_config["env_prefix"] = names.env_prefix(cls.role)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """A call takes what it is given; `read_settings` is what looks around."""
        return (init_settings,)


class ServiceSettings(RoleSettings):
    """What every process can be told. A service's own settings derive from it and name their `role`."""

    together: ClassVar[tuple[Together, ...]] = (TLS,)

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
    tls_cert: File = None
    """This process's certificate inside, in PEM, with its role in its names (docs/security.md); read again
    when it changes. With it go tls_key and tls_ca. Default: services talk to one another in plain."""
    tls_key: File = None
    """The key of that certificate, without a passphrase."""
    tls_ca: File = None
    """Certificates of the authority inside: who shows none that it signed is not talked to."""
    grace_s: Annotated[float, Field(ge=0, le=3600)] = 2.0
    """How long calls in flight may go on after a signal to stop, in seconds."""
    parent_pid: int | None = None
    """End as soon as this process, which must be the parent, has ended."""


Settings = TypeVar("Settings", bound=RoleSettings)


def read_settings(
    kind: type[Settings], arguments: Sequence[str], environment: Mapping[str, str] | None = None
) -> Settings:
    """Reads flags, variables and the configuration file. Raises ValueError with every fault."""
    told = gather(kind.role, kind, arguments, environment)
    settings = check(kind, told)
    if settings is None or told.problems:
        raise Wrong(told.problems)
    assert isinstance(settings, kind)
    return settings


def settings_or_exit(kind: type[Settings], arguments: Sequence[str] | None = None) -> Settings:
    """For a `__main__`: tells a fault on standard error and, as JSON, on standard output; exits with 2."""
    try:
        return read_settings(kind, sys.argv[1:] if arguments is None else arguments)
    except ValueError as error:
        print(f"{kind.role}: {error}", file=sys.stderr)
        print(json.dumps({"error": {"code": "INVALID_ARGUMENT", "message": str(error)}}), flush=True)
        raise SystemExit(2) from error


def as_variables(settings: RoleSettings, without: frozenset[str] = frozenset()) -> dict[str, str]:
    """The environment from which a further process of the role reads the same settings.

    `without` leaves fields out. A secret that came from a file is named by that file alone.
    """
    given: dict[str, str] = {}
    for setting in names.settings_of(type(settings)):
        value, beside = _value_at(settings, setting.path), _value_at(settings, _sibling(setting.path))
        if value is not None and beside is None and setting.path[0] not in without:
            given[names.variable(settings.role, setting.path)] = _as_text(value)
    return given


def _sibling(path: names.Path) -> names.Path:
    return (*path[:-1], path[-1] + SUFFIX)


def _value_at(settings: Any, path: names.Path) -> Any:
    for name in path:
        settings = getattr(settings, name, None)
    return settings


def _as_text(value: Any) -> str:
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    return ",".join(map(_as_text, value)) if isinstance(value, tuple) else str(value)
