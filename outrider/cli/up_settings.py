"""What `outrider up` can be told: flags over OUTRIDER_UP__FIELD over the file's table [up].

The services that it starts read the same file. A flag of `up` holds for all of them; what `up` decides
otherwise yields to the service's own table and variables.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from outrider.cli.failures import usage
from outrider.cli.said import Said
from outrider.cli.stack import StackOptions
from outrider.runtime.config_file import ConfigFile
from outrider.runtime.gathering import check, gather
from outrider.runtime.log import Level
from outrider.runtime.problems import Wrong
from outrider.runtime.setting_names import ROLES, env_prefix, flag
from outrider.runtime.settings import Address, Names, RoleSettings


class UpSettings(RoleSettings):
    """Flags of `outrider up`, variables OUTRIDER_UP__FIELD, the file's table [up]."""

    role: ClassVar[str] = "up"

    target: str = ""
    """The target: a Hugging Face folder, or an id, NAME or NAME@REVISION. Default: the embedded pair."""
    drafter: str = ""
    """The drafter: a folder, an id, or `none`. Default: none where there is a target."""
    bind: Address = "127.0.0.1:0"
    """Where the front door is; port 0 picks one."""
    http_bind: Address = "127.0.0.1:0"
    """The same for OpenAI's API over HTTP."""
    threads: Annotated[int, Field(ge=1)] | None = None
    """Compute threads of verifier and drafter each. Default: by cores."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """What the models compute in."""
    device: str = "cpu"
    """The torch device."""
    retrieval: Literal["", "none"] = ""
    """`none` leaves the retrieval worker out."""
    corpus: Names = ()
    """Corpora of `outrider index build` to draft from."""
    folder: str = ""
    """Where past outputs are kept. Default: in memory."""
    log_level: Level = "warning"
    """What the services log."""


def read_up(flags: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> StackOptions:
    """What `up` was told by flags (None: not) and what variables and the file say. Raises CommandFailed."""
    environment = os.environ if environment is None else environment
    given = {name: value for name, value in flags.items() if value not in (None, [])}
    try:
        told = gather(UpSettings.role, UpSettings, list(_arguments(given)), environment)
        settings = check(UpSettings, told)
        if told.problems or settings is None:
            raise Wrong(told.problems)
    except ValueError as error:
        raise usage(str(error)) from error
    assert isinstance(settings, UpSettings)
    said = Said(
        config="" if told.file is None else str(told.file.path.expanduser().resolve()),
        by_role={role: said for role in ROLES if (said := _said_to(role, told.file, environment))},
        by_flag=frozenset(given),
    )
    return StackOptions(
        target=_model(settings.target, "target", said, "verifier"),
        drafter=_model(settings.drafter, "drafter", said, "drafter"),
        bind=settings.bind,
        http_bind=settings.http_bind,
        threads=settings.threads,
        dtype=settings.dtype,
        device=settings.device,
        log_level=settings.log_level,
        retrieval=settings.retrieval != "none",
        corpora=settings.corpus,
        folder=settings.folder,
        said=said,
    )


def _arguments(given: Mapping[str, Any]) -> Sequence[str]:
    """The flags again, as they may be written."""
    parts: list[str] = []
    for name, value in given.items():
        for one in value if isinstance(value, list) else [value]:
            parts.append(f"{flag((name,))}={one}")
    return parts


def _said_to(role: str, file: ConfigFile | None, environment: Mapping[str, str]) -> dict[str, Any]:
    said = {} if file is None else dict(file.table(role))
    prefix = env_prefix(role)
    for name, value in environment.items():
        if name.upper().startswith(prefix):
            said[name[len(prefix) :].lower()] = value
    return said


def _model(asked: str, name: str, said: Said, role: str) -> str:
    """One model may be named twice, but only alike."""
    named = said.text(role, "model")
    if asked and named and asked != named and name not in said.by_flag:
        raise usage(f"up.{name} = {asked!r}, but the model of the {role} is {named!r}: say one of them")
    return asked or named
