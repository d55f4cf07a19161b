"""Writes the tables of docs/configuration.md: `python -m outrider.cli.config.table docs/configuration.md`.

The program replaces the text between the two marks by tables made from the classes of settings.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from outrider.cli.config.check import kinds
from outrider.runtime.setting_names import Setting, settings_of
from outrider.runtime.settings import RoleSettings, ServiceSettings

BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"
COMMAND = "python -m outrider.cli.config.table docs/configuration.md"
_LIMITS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below", "max_length": "up to"}


def tables() -> str:
    """Tables of the settings of every role, as Markdown."""
    common = [setting.dotted for setting in settings_of(ServiceSettings)]
    parts = ["## Every service", "", *_table(list(settings_of(ServiceSettings)))]
    for role, kind in kinds().items():
        own = [one for one in settings_of(kind) if one.dotted not in common or not _is_service(kind)]
        parts += ["", f"## `[{role}]`", "", *_table(own)]
    return "\n".join(parts)


def rewritten(text: str) -> str:
    """A document's text with new tables. Raises ValueError where the marks are missing."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"no place for tables: {BEGIN} and {END} are missing")
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{after}"


def _is_service(kind: type[RoleSettings]) -> bool:
    return issubclass(kind, ServiceSettings)


def _table(settings: list[Setting]) -> Iterator[str]:
    yield "| setting | takes | default | |"
    yield "|---|---|---|---|"
    for setting in settings:
        words = " ".join((setting.field.description or "").split()).replace("|", "\\|")
        yield f"| `{setting.dotted}` | {_takes(setting.field)} | {_default(setting.field)} | {words} |"


def _takes(field: FieldInfo) -> str:
    bounds = {name: getattr(one, name) for one in field.metadata for name in _LIMITS if hasattr(one, name)}
    bounds |= {name: bound for name, bound in _inner_bounds(field.annotation).items() if name not in bounds}
    limits = [f"{_LIMITS[name]} {bound:,}" for name, bound in bounds.items() if bound is not None]
    return ", ".join([_kind(field.annotation), *limits])


def _inner_bounds(annotation: Any) -> dict[str, Any]:
    """Bounds inside of a union, such as those in `Annotated[int, Field(ge=1)] | None`."""
    found: dict[str, Any] = {}
    for part in get_args(annotation):
        for field in getattr(part, "__metadata__", ()):
            if isinstance(field, FieldInfo):
                found |= {
                    name: getattr(one, name)
                    for one in field.metadata
                    for name in _LIMITS
                    if hasattr(one, name)
                }
    return found


def _kind(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{choice}`" if choice else "nothing" for choice in get_args(annotation))
    if get_origin(annotation) is tuple:
        return "a list"
    if get_origin(annotation) is Annotated:
        return _kind(get_args(annotation)[0])
    inner = [part for part in get_args(annotation) if part is not NoneType]
    if inner:
        return " or ".join(map(_kind, inner))
    names = {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        Path: "a path",
        SecretStr: "a secret",
    }
    return names.get(annotation, "text")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if field.default_factory is not None:
        return "by machine"
    if field.default is None or field.default == "" or field.default == ():
        return "none"
    return f"`{str(field.default).lower() if isinstance(field.default, bool) else field.default}`"


def main() -> None:
    """Rewrites the document that the first argument names."""
    path = Path(sys.argv[1])
    path.write_text(rewritten(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
