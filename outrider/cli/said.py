"""What a configuration file and variables already say to the services that `outrider up` starts.

Knows nothing of whether it is right: each service checks what is said to it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Said:
    """Per role, below what `up` was told by flags and above what `up` decides otherwise."""

    config: str = ""
    """The configuration file that the services read; empty: none."""
    by_role: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Role, setting, value as it was written; settings within groups are left out."""
    by_flag: frozenset[str] = frozenset()
    """Settings that `up` was told by flags: these hold for every service."""

    def text(self, role: str, name: str) -> str:
        """A value as it was said; empty where it was not."""
        value = self.by_role.get(role, {}).get(name)
        return "" if value is None else str(value)

    def flags(self, role: str, decided: Mapping[str, str]) -> list[str]:
        """Flags for what `up` decides, but for what is already said to the role."""
        unsaid = {
            name: value
            for name, value in decided.items()
            if name in self.by_flag or not self.text(role, name)
        }
        return [part for name, value in unsaid.items() for part in (f"--{name.replace('_', '-')}", value)]

    def environment(self) -> dict[str, str]:
        """What a service's process is started with."""
        return {"OUTRIDER_CONFIG": self.config} if self.config else {}
