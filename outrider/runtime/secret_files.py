"""Secrets among settings: each may also be given in a file, and none is ever shown.

A field whose type is or contains SecretStr gets a sibling: `token: SecretStr | None` also makes the field
`token_file`, a path. Other users of a machine can read arguments and variables; a file has an owner. This
module knows nothing of where values come from.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    SecretStr,
    ValidationInfo,
    model_validator,
)

from outrider.runtime.problems import Together

SUFFIX = "_file"
MASK = "**********"
MOST_BYTES = 2**20


def _readable(path: Path | None) -> Path | None:
    if path is not None:
        _text(path)
    return path


class _Beside(str):
    """Path of a secret file where the secret itself is given too."""

    __slots__ = ()


def _alone(given: Any, info: ValidationInfo) -> Any:
    if isinstance(given, _Beside):
        name = str(info.field_name)
        raise ValueError(f"give {name.removesuffix(SUFFIX)} or {name}, not both")
    return None if given == "" else given


SecretFile = Annotated[Path | None, AfterValidator(_readable), BeforeValidator(_alone)]


class SecretFiles(BaseModel):
    """Base of every class of settings; adds the `_file` fields to each derived class."""

    together: ClassVar[tuple[Together, ...]] = ()
    """Settings that must be given together or not at all."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Adds the `_file` fields before pydantic collects the fields."""
        super().__init_subclass__(**kwargs)
        own, widened = cls.__annotations__, {}
        for name, kind in own.items():
            widened[name] = kind
            sibling = name + SUFFIX
            if holds_secret(kind) and sibling not in own:
                widened[sibling] = SecretFile
                words = f"File that holds {name}: other users can read arguments and variables."
                setattr(cls, sibling, Field(default=None, description=words))
        cls.__annotations__ = widened

    def incomplete(self) -> Iterator[str]:
        """Messages about settings that lack others which they need; another source may give those."""
        yield from ()

    @model_validator(mode="before")
    @classmethod
    def _read_secret_files(cls, values: Any) -> Any:
        """Sets each secret that is given as a file. Faults of the file are reported by its `_file` field."""
        if not isinstance(values, dict):
            return values
        read = dict(values)
        for name in secret_names(cls):
            file = read.get(name + SUFFIX)
            if file is None:
                continue
            if read.get(name) is not None:  # reported as a fault of the `_file` field, with all other faults
                read[name + SUFFIX] = _Beside(file)
                continue
            try:
                read[name] = _text(Path(file))
            except (ValueError, TypeError):
                read.pop(name, None)
        return read


def secret_names(kind: type[BaseModel]) -> list[str]:
    """Names of a class' own fields that hold secrets; fields of groups are left out."""
    return [name for name, field in kind.model_fields.items() if holds_secret(field.annotation)]


def rival(kind: type[BaseModel], name: str) -> str:
    """The name of the other field for the same secret; empty where `name` is no secret and no file of one."""
    secrets = secret_names(kind)
    if name in secrets:
        return name + SUFFIX
    bare = name.removesuffix(SUFFIX)
    return bare if bare != name and bare in secrets else ""


def holds_secret(annotation: Any) -> bool:
    """Whether a type is or contains SecretStr."""
    return annotation is SecretStr or any(holds_secret(part) for part in get_args(annotation))


def _text(path: Path) -> str:
    """A file's text without surrounding space. Raises ValueError, which quotes none of the text."""
    try:
        with path.expanduser().open("rb") as file:
            text = file.read(MOST_BYTES + 1).decode().strip()
    except (OSError, UnicodeDecodeError, RuntimeError) as error:
        raise ValueError(f"it cannot be read: {type(error).__name__}") from None
    if not text or len(text) > MOST_BYTES:
        raise ValueError("it is empty" if not text else f"it has more than {MOST_BYTES} bytes")
    return text
