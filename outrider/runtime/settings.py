"""Settings of a process: flags over OUTRIDER_<ROLE>__FIELD over the role's table of one configuration file.

Nothing unknown passes at any level. Only a service's `__main__` reads them; everything below receives plain
values, and a class of settings that is called takes what it is given and nothing else.
"""

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from ipaddress import IPv6Address
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, SecretStr
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from outrider.runtime import setting_names as names
from outrider.runtime.log import Format, Level
from outrider.runtime.problems import Together, WrongSettings
from outrider.runtime.secret_files import SUFFIX, SecretFiles
from outrider.runtime.settings_sources import check, gather


class Group(SecretFiles):
    """Base of nested settings; refuses unknown fields as the settings themselves do."""

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
"""A list of strings, written as A,B."""


def _split_numbers(value: Any) -> Any:
    if type(value) is int:
        return (str(value),)
    return _split([str(item) for item in value] if isinstance(value, list | tuple) else value)


NumberedNames = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_numbers)]
"""A list of strings that may be written as numbers, such as 1,2.b."""


def _named(path: Any) -> Any:
    return None if path == "" else path


File = Annotated[Path | None, BeforeValidator(_named)]
"""A file's path. An empty string is None: a compose file passes unset variables on as empty ones."""


def cache_folder() -> Path:
    """The user's cache folder of Outrider. Raises RuntimeError for a user without a home folder."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "outrider"


def default_cache_dir() -> Path | None:
    """The user's cache folder of Outrider; None for a user without a home folder."""
    try:
        return cache_folder()
    except RuntimeError:
        return None


def _kept_in(path: Any) -> Any:
    return None if path in ("", "none") else path


CacheDir = Annotated[Path | None, BeforeValidator(_kept_in)]
"""A folder for what is kept between starts; `none`: nothing is kept."""

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
"""Prefix of a peer whose name resolves to any number of addresses."""


def _checked_peer(peer: str) -> str:
    checked_address(peer.removeprefix(DNS), lowest=1)
    return peer


Peers = Annotated[
    tuple[Annotated[str, AfterValidator(_checked_peer)], ...], NoDecode, BeforeValidator(_split)
]
"""Addresses to dial, written as A,B; dns:NAME:PORT is each address that the name has at the time."""


class RoleSettings(SecretFiles, BaseSettings):
    """Base of all settings with a table in the configuration file; each class sets its `role`."""

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
    """TOML file with a table per role; variables and flags win over its values. Default: the file that
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
        """Constructors take their arguments alone; `read_settings` reads flags, variables and files."""
        return (init_settings,)


class ServiceSettings(RoleSettings):
    """Settings of every service. Each service derives its own class and sets its `role`."""

    together: ClassVar[tuple[Together, ...]] = (TLS,)

    bind: Address = "127.0.0.1:0"
    """host:port to serve gRPC on; port 0 picks a free port."""
    metrics_bind: Address = "127.0.0.1:0"
    """host:port to serve /metrics, /healthz, /readyz and /stalls on, over HTTP."""
    log_level: Level = "info"
    """The least severe events to log."""
    log_format: Format = "plain"
    """One event per line, as text or as a JSON object."""
    trace_endpoint: Annotated[str, Field(pattern=r"^https?://[^\s/]+:\d+/?$")] | None = None
    """OTLP collector that gets the spans of requests, as http://host:port. Default: none."""
    trace_sample: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Share of requests to trace, among those that come without a trace of their own."""
    max_message_mb: Annotated[int, Field(ge=1, le=1024)] = 8
    """Largest message to accept from a peer, in MiB."""
    tls_cert: File = None
    """PEM file with the certificate that this process shows to other services; its names hold the role
    (docs/security.md). Read again when it changes; needs tls_key and tls_ca. Default: services talk to one
    another without encryption."""
    tls_key: File = None
    """PEM file with the key of tls_cert, without a passphrase."""
    tls_ca: File = None
    """PEM file with the certificates of the authority: services without a certificate that it signed are
    refused."""
    grace_s: Annotated[float, Field(ge=0, le=3600)] = 2.0
    """Seconds that running calls may take to finish after a signal to stop."""
    parent_pid: int | None = None
    """Process id of the parent: this process ends as soon as the parent has ended."""


def _bracketed(address: Any) -> Any:
    """Puts a bare IPv6 host into brackets: Kubernetes gives a pod's address without them.

    What stands behind the last colon is the port, so an address without a port is read as another one's.
    """
    host, _, port = str(address).rpartition(":")
    try:
        return f"[{IPv6Address(host)}]:{port}"
    except ValueError:
        return address


Reached = Annotated[str, BeforeValidator(_bracketed), AfterValidator(partial(checked_address, lowest=1))]
"""host:port that others dial."""


class WorkerSettings(ServiceSettings):
    """Base of the settings of verifier, drafter and retrieval."""

    role: ClassVar[str] = "worker"

    register_with: Peers = ()
    """Orchestrators to register with: their --registry-bind, host:port or dns:NAME:PORT, separated by commas.
    They use this worker without listing it, and move its sessions when it ends. Default: none."""
    advertise: Reached | None = None
    """host:port at which orchestrators and verifiers reach this worker. Default: its bound address."""


OF_THIS_PROCESS = frozenset({"register_with", "advertise"})
"""Settings of one process that further processes of the same worker do not take over."""


Settings = TypeVar("Settings", bound=RoleSettings)


def read_settings(
    kind: type[Settings], arguments: Sequence[str], environment: Mapping[str, str] | None = None
) -> Settings:
    """Reads flags, variables and the configuration file. Raises ValueError with every fault."""
    given = gather(kind.role, kind, arguments, environment)
    settings = check(kind, given)
    if settings is None or given.problems:
        raise WrongSettings(given.problems)
    assert isinstance(settings, kind)
    return settings


def settings_or_exit(kind: type[Settings], arguments: Sequence[str] | None = None) -> Settings:
    """For a `__main__`: prints a fault on standard error and, as JSON, on standard output; exits with 2."""
    try:
        return read_settings(kind, sys.argv[1:] if arguments is None else arguments)
    except ValueError as error:
        print(f"{kind.role}: {error}", file=sys.stderr)
        print(json.dumps({"error": {"code": "INVALID_ARGUMENT", "message": str(error)}}), flush=True)
        raise SystemExit(2) from error


def as_variables(settings: RoleSettings, without: frozenset[str] = frozenset()) -> dict[str, str]:
    """Environment variables that give a further process of the role the same settings.

    `without` names fields to leave out. A secret from a file is passed on as that file alone.
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
