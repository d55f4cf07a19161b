"""Tables of implementations by name, {"name": "module:attribute"}: naming one imports no other."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any


def load(table: Mapping[str, str], name: str) -> Any:
    """What `table` has under `name`.

    Raises:
        KeyError: no such name; the message lists those there are.
    """
    if name not in table:
        raise KeyError(f"there is no {name!r}; there are {', '.join(sorted(table))}")
    module, _, attribute = table[name].partition(":")
    return getattr(import_module(module), attribute)
