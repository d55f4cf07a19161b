"""The configuration file: TOML with a table per role, and one for `outrider up`.

Only `--config FILE` and OUTRIDER_CONFIG name the file: a file that happens to lie in a working directory is
never read. This module does not know which settings a role has.
"""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from outrider.runtime.problems import Problem
from outrider.runtime.setting_names import TABLES, did_you_mean

MOST_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A parsed configuration file, not yet checked."""

    path: Path
    content: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads a file. Raises ValueError where it cannot be read or is no TOML (with line and column)."""
        try:
            with path.expanduser().open("rb") as file:
                text = file.read(MOST_BYTES + 1)
        except OSError as error:
            raise ValueError(f"config file {str(path)!r} cannot be read: {error.strerror}") from error
        if len(text) > MOST_BYTES:
            raise ValueError(f"config file {str(path)!r} has more than {MOST_BYTES} bytes")
        try:
            return cls(path, tomllib.loads(text.decode()))
        except UnicodeDecodeError as error:
            raise ValueError(f"config file {str(path)!r} is not UTF-8 at byte {error.start}") from error
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"config file {str(path)!r} is no TOML: {error}") from error
        except RecursionError as error:
            raise ValueError(f"config file {str(path)!r} is nested too deeply to be read") from error
        except ValueError as error:  # a number with thousands of digits
            raise ValueError(f"config file {str(path)!r} cannot be read: {error}") from error

    def table(self, name: str) -> dict[str, Any]:
        """A role's table; empty where the file has none."""
        found = self.content.get(name, {})
        return found if isinstance(found, dict) else {}

    def problems(self) -> Iterator[Problem]:
        """Problems of tables and settings that no role reads."""
        tables = [f"[{name}]" for name in TABLES]
        for name, value in self.content.items():
            if isinstance(value, dict) and name not in TABLES:
                what = f"is no table; {did_you_mean(f'[{name}]', tables)}"
                yield Problem(f"[{name}]", what, origin=str(self.path))
            elif not isinstance(value, dict):
                what = f"stands outside of every table; a setting belongs below one of {', '.join(tables)}"
                yield Problem(name, what, origin=str(self.path))
