"""Settings of `outrider up`: flags over OUTRIDER_UP__FIELD over the file's table [up].

The services that `up` starts read the same file. A flag of `up` holds for all of them; what `up` decides
otherwise yields to the service's own table and variables. Each service checks its own settings.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from outrider.cli.failures import CommandFailed, usage
from outrider.runtime.children import ROOT
from outrider.runtime.config_file import ConfigFile
from outrider.runtime.log import Level
from outrider.runtime.problems import WrongSettings
from outrider.runtime.setting_names import ROLES, env_prefix, flag
from outrider.runtime.settings import Address, Names, RoleSettings
from outrider.runtime.settings_sources import check, gather
from outrider.runtime.threads import cpu_limit

AUTO, NONE = "auto", "none"
"""Values of `drafter` that name no model."""
DRAFTER = "drafter"
"""Role of drafters, and name of the first one as a source."""
EMBEDDED = ROOT / "models" if (ROOT / "models" / "heldout.jsonl").is_file() else ROOT / "outrider" / "models"
"""The folder of the embedded pair: of a clone, or of an installed wheel."""
ALONE = tuple(word for name in ("heads", "small-model", "amateur", "learn") for word in (f"--{name}", ""))
"""Flags of a verifier that holds no other weights than its target's, whatever file and variables say."""


class UpSettings(RoleSettings):
    """Flags of `outrider up`, variables OUTRIDER_UP__FIELD, the file's table [up]."""

    role: ClassVar[str] = "up"

    target: str = ""
    """The target: a Hugging Face folder, or an id, NAME or NAME@REVISION. Default: the embedded pair."""
    drafter: str = ""
    """The drafter: a folder, an id, `none`, or `auto`, which looks for a model that can draft for the target;
    A,B starts several, which draft for the same sessions. Default: auto."""
    serve_drafter: bool = False
    """Whether the drafter, or the first of several, also answers requests, as the model NAME:drafter, by a
    verifier of its own."""
    heads: Names = ()
    """Heads of the target that draft inside the verifier, beside the drafter: folders, ids, `eagle` and
    `medusa` of the embedded target, or `auto`, the head that is known for the target, if there is one;
    NAME=FOLDER gives the source a name of its own. Default: none."""
    amateur: str = ""
    """A weaker model with the target's tokenizer, for contrastive decoding: a folder, an id, or `drafter`,
    the drafter of the embedded pair. Default: none."""
    bind: Address | None = None
    """host:port of the orchestrator for clients; port 0 picks any free port. Default: 127.0.0.1:50051, or the
    next port that is free."""
    http_bind: Address | None = None
    """host:port of OpenAI's API over HTTP; port 0 picks any free port. Default: 127.0.0.1:8000, or the next
    port that is free."""
    threads: Annotated[int, Field(ge=1)] | None = None
    """Compute threads of the verifier, and of the drafter. By default each measures how many to use: of its
    share of the cores for eager passes, of all cores for compiled ones."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format in which the models compute; auto: the checkpoint's on a GPU, float32 on a CPU."""
    weight_dtype: Literal["auto", "bfloat16", "int8"] = "auto"
    """Number format in which the models' linear layers keep their weights: auto, that of the passes; bfloat16
    or int8, on a CPU with AVX-512 under passes in float32."""
    device: str = "auto"
    """Torch device of the models, such as cpu or cuda; auto: cuda where there is a GPU, else cpu."""
    passes: Literal["auto", "eager", "compiled"] = "auto"
    """How the models' passes run on the CPU in float32: eager; compiled, before serving; auto: eagerly until
    compiled passes are ready."""
    retrieval: Literal["", "none"] = ""
    """`none`: start no retrieval worker; left out or empty: start one."""
    corpus: Names = ()
    """Corpora to draft from, as `outrider index build` makes them."""
    folder: str = ""
    """Folder that keeps past outputs to draft from. Default: memory alone."""
    log_level: Level = "warning"
    """The least severe events that the services log."""


@dataclass(frozen=True, slots=True)
class ServiceOverrides:
    """Settings that services have from the file and variables: below flags of `up`, above its own choices."""

    config: str = ""
    """The configuration file that the services read; empty: none."""
    by_role: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Role to setting to value as written; settings within groups are left out."""
    by_flag: frozenset[str] = frozenset()
    """Names of the settings that `up` has from flags, which hold for every service."""

    def text(self, role: str, name: str) -> str:
        """A role's value of a setting as text; empty where the role has none."""
        value = self.by_role.get(role, {}).get(name)
        return "" if value is None else str(value)

    def listed(self, role: str, name: str) -> str:
        """A role's value of a setting that is a list, as A,B; empty where the role has none."""
        value = self.by_role.get(role, {}).get(name)
        return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value or "")

    def flags(self, role: str, decided: Mapping[str, str]) -> list[str]:
        """The values that `up` decides as flags, without settings that the role has otherwise."""
        left = {
            name: value
            for name, value in decided.items()
            if name in self.by_flag or not self.text(role, name)
        }
        return [part for name, value in left.items() for part in (f"--{name.replace('_', '-')}", value)]

    def environment(self) -> dict[str, str]:
        """Variables to start a service's process with."""
        return {"OUTRIDER_CONFIG": self.config} if self.config else {}


@dataclass(frozen=True, slots=True)
class StackOptions:
    """Which services `outrider up` starts, and how."""

    target: str = ""
    """A folder or an id; empty: the embedded pair's target."""
    drafter: str = ""
    """A folder, an id, several as A,B, `none` or `auto`; empty: auto, which is the embedded drafter for its
    target."""
    target_folder: str = ""
    """Folder of the target's files where all models are known to lie on this machine, so that services ask
    nothing of the network; else empty."""
    serve_drafter: bool = False
    """Whether a second verifier answers requests with the drafter's weights."""
    heads: tuple[str, ...] = ()
    """Heads of the target, as the verifier's setting takes them; AUTO is still to be chosen."""
    amateur: str = ""
    """Folder or id of the amateur for contrastive decoding; empty: none."""
    bind: str = ""
    """host:port; empty: port 50051 of 127.0.0.1, or the next that is free."""
    http_bind: str = ""
    """host:port; empty: port 8000 of 127.0.0.1, or the next that is free."""
    threads: int | None = None
    dtype: str = "auto"
    weight_dtype: str = "auto"
    device: str = "auto"
    passes: str = "auto"
    log_level: str = "warning"
    retrieval: bool = True
    corpora: tuple[str, ...] = ()
    """Folders of corpora to draft from."""
    folder: str = ""
    """Where the retrieval worker keeps past outputs; empty: in memory alone."""
    overrides: ServiceOverrides = field(default_factory=ServiceOverrides)
    """Settings of single services; they win over most of the fields above."""

    def models(self) -> tuple[str, tuple[str, ...]]:
        """Target and drafters; the only drafter AUTO is still to be chosen.

        Raises CommandFailed if a model is missing, if one of several drafters is `none`, `auto` or no name at
        all, or if no drafter is there to serve.
        """
        target = _folder_or_id(self.target) if self.target else str(embedded("target"))
        drafters = tuple(part.strip() for part in self.drafter.split(",")) if self.drafter else ()
        if "" in drafters:
            raise usage(
                f"--drafter {self.drafter!r} has an empty name: give a model, several as A,B, auto or none"
            )
        if drafters == (NONE,):
            if self.serve_drafter:
                raise usage("--serve-drafter needs a drafter, and there is none: name one by --drafter")
            return target, ()
        if drafters not in ((), (AUTO,)):
            for name in {NONE, AUTO} & set(drafters):
                raise usage(f"--drafter {self.drafter}: {name} stands alone, not beside other drafters")
            return target, tuple(_folder_or_id(drafter) for drafter in drafters)
        return target, (AUTO,) if self.target else (str(embedded("drafter")),)

    def device_of(self, role: str) -> str:
        """The torch device that a model's service is asked to compute on."""
        by_flag = "device" in self.overrides.by_flag
        return self.device if by_flag else self.overrides.text(role, "device") or self.device

    def thread_counts(self, drafters: int) -> tuple[int, int]:
        """The most compute threads of the verifier and of each drafter.

        One core stays free where there are several.
        """
        if self.threads is not None:
            return self.threads, self.threads
        cores = int(cpu_limit())
        drafting = max(drafters, (cores - 1) // 4) if drafters else 0
        return max(1, cores - 1 - drafting), max(1, drafting // max(1, drafters))


def drafter_names(count: int, first: str = DRAFTER) -> tuple[str, ...]:
    """Names of `count` drafters as sources: the first name, then this name with a number."""
    return (first, *(f"{first}-{number}" for number in range(2, count + 1)))[:count]


def _folder_or_id(model: str) -> str:
    """The model's folder or id. Raises CommandFailed for a path that holds no model."""
    path = Path(model).expanduser()
    if model.startswith(("/", ".", "~")) and not (path / "config.json").is_file():
        raise CommandFailed(f"there is no model at {path}: it has no config.json", "NOT_FOUND")
    return str(path) if path.is_dir() and model else model


def _heads(named: tuple[str, ...], flags: Sequence[str]) -> tuple[str, ...]:
    """The heads as the verifier takes them. Raises CommandFailed for an empty name and one that comes twice.

    An empty variable names no head, as compose files pass on unset ones; an empty flag is a mistake.
    """
    for given in flags:
        if not all(part.strip() for part in given.split(",")):
            raise usage(f"--heads {given!r} has an empty name: give a head, several as A,B, auto or none")
    if named == (NONE,):
        return ()
    heads = tuple(map(_head, named))
    for text, head in zip(named, heads, strict=True):
        if heads.count(head) > 1:
            raise usage(f"--heads: {text!r} is named twice; name each head once")
    return heads


def _head(text: str) -> str:
    """The head as the verifier takes it: the name of an embedded head becomes its folder."""
    before, equals, head = text.rpartition("=")
    folder = EMBEDDED / "heads" / head
    is_embedded = head.isidentifier() and not Path(head).exists() and (folder / "config.json").is_file()
    return f"{before}{equals}{folder}" if is_embedded else text


def _amateur(text: str) -> str:
    """The amateur as the verifier takes it: `drafter` becomes the embedded drafter's folder."""
    if not text or (text == DRAFTER and not Path(text).exists()):
        return str(embedded(DRAFTER)) if text else ""
    return _folder_or_id(text)


def embedded(which: str) -> Path:
    """The folder of the embedded pair's `target` or `drafter`. Raises CommandFailed where it is missing."""
    path = EMBEDDED / which
    if not (path / "config.json").is_file():
        raise CommandFailed(
            f"there is no embedded model at {path}: a clone and a wheel of `make dist` have it; "
            "name a model: outrider up PATH|ID",
            "NOT_FOUND",
        )
    return path


def read_up(flags: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> StackOptions:
    """Options from flags (None: not given), variables and the file. Raises CommandFailed."""
    environment = os.environ if environment is None else environment
    flagged = {name: value for name, value in flags.items() if value not in (None, [])}
    try:
        given = gather(UpSettings.role, UpSettings, list(_arguments(flagged)), environment)
        settings = check(UpSettings, given)
        if given.problems or settings is None:
            raise WrongSettings(given.problems)
    except ValueError as error:
        raise usage(str(error)) from error
    assert isinstance(settings, UpSettings)
    for name in ("corpus", "folder"):
        if settings.retrieval == NONE and flagged.get(name, "") not in ("", [""]):
            raise usage(
                f"--{name} needs the retrieval worker, which retrieval = none does not start; leave one of "
                "them out"
            )
    overrides = ServiceOverrides(
        config="" if given.file is None else str(given.file.path.expanduser().resolve()),
        by_role={role: own for role in ROLES if (own := _settings_for(role, given.file, environment))},
        by_flag=frozenset(flagged),
    )
    return StackOptions(
        target=_model(settings.target, "target", overrides, "verifier"),
        drafter=_model(settings.drafter, "drafter", overrides, "drafter"),
        serve_drafter=settings.serve_drafter,
        heads=_heads(settings.heads, flagged.get("heads", [])),
        amateur=_amateur(settings.amateur),
        bind=settings.bind or "",
        http_bind=settings.http_bind or "",
        threads=settings.threads,
        dtype=settings.dtype,
        weight_dtype=settings.weight_dtype,
        device=settings.device,
        passes=settings.passes,
        log_level=settings.log_level,
        retrieval=settings.retrieval != "none",
        corpora=settings.corpus,
        folder=settings.folder,
        overrides=overrides,
    )


def _arguments(flagged: Mapping[str, Any]) -> Sequence[str]:
    """The given flags as arguments of a command line."""
    parts: list[str] = []
    for name, value in flagged.items():
        for one in value if isinstance(value, list) else [value]:
            parts.append(flag((name,)) if one is True else f"{flag((name,))}={one}")
    return parts


def _settings_for(role: str, file: ConfigFile | None, environment: Mapping[str, str]) -> dict[str, Any]:
    """A service's own settings, from its table of the file and from its variables."""
    found = {} if file is None else dict(file.table(role))
    prefix = env_prefix(role)
    for name, value in environment.items():
        if name.upper().startswith(prefix):
            found[name[len(prefix) :].lower()] = value
    return found


def _model(asked: str, name: str, overrides: ServiceOverrides, role: str) -> str:
    """The model of `up` or of the service. Raises CommandFailed where both name one and these differ."""
    named = overrides.text(role, "model")
    if asked and named and asked != named and name not in overrides.by_flag:
        raise usage(f"up.{name} = {asked!r}, but the model of the {role} is {named!r}: say one of them")
    return asked or named
