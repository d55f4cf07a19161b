"""Tables of implementations by name, {"name": "module:attribute"}: naming one imports no other."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any


def load_implementation(table: Mapping[str, str], name: str) -> Any:
    """Imports and returns the attribute that `table` names under `name`.

    Raises:
        KeyError: the table has no such name; the message lists its names.
    """
    if name not in table:
        raise KeyError(f"there is no {name!r}; there are {', '.join(sorted(table))}")
    module, _, attribute = table[name].partition(":")
    return getattr(import_module(module), attribute)
