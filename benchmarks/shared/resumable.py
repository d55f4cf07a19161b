"""A file of measurements by key, with which a benchmark that was cut off goes on where it was.

The first line holds the settings, every other line one measurement. Knows nothing about what is measured.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Key = tuple[str | int | float, ...]


class ResumeFile:
    """Measurements that are kept as they are made.

    Args:
        path: the file; None: measurements are kept in memory only.
        settings: what every measurement depends on. A file with other settings is refused.

    Raises:
        SystemExit: the file belongs to other settings, or a line of it is broken. A last line that was cut
            off in the middle is dropped, as a killed run leaves one.
    """

    def __init__(self, path: Path | None, settings: Mapping[str, Any]) -> None:
        self._path = path
        self._found: dict[Key, Any] = {}
        head = json.loads(json.dumps({"settings": settings}))
        if path is None:
            return
        if path.exists() and (lines := self._whole_lines(path)):
            self._check_settings(path, lines[0], head)
            for number, line in enumerate(lines[1:], start=2):
                record = _parsed(path, number, line)
                if not isinstance(record.get("key"), list) or "value" not in record:
                    raise SystemExit(
                        f"{path}:{number}: this is no measurement; remove the file to start anew"
                    )
                self._found[tuple(record["key"])] = record["value"]
        else:
            path.write_text(json.dumps(head) + "\n", encoding="utf-8")

    def __contains__(self, key: Key) -> bool:
        return key in self._found

    def __getitem__(self, key: Key) -> Any:
        return self._found[key]

    def __len__(self) -> int:
        return len(self._found)

    def add(self, key: Key, value: Any) -> None:
        """Keeps a measurement; `value` is anything that JSON can hold."""
        self._found[key] = value
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": key, "value": value}) + "\n")

    @staticmethod
    def _whole_lines(path: Path) -> list[str]:
        text = path.read_text(encoding="utf-8")
        whole, _, rest = text.rpartition("\n")
        if rest:
            path.write_text(whole + "\n" if whole else "", encoding="utf-8")
        return whole.splitlines()

    @staticmethod
    def _check_settings(path: Path, line: str, head: dict[str, Any]) -> None:
        there, ours = _parsed(path, 1, line).get("settings"), head["settings"]
        if not isinstance(there, dict):
            raise SystemExit(f"{path}:1: this file holds no measurements to go on from; name another file")
        differing = sorted(name for name in {*there, *ours} if there.get(name) != ours.get(name))
        if differing:
            name = differing[0]
            raise SystemExit(
                f"{path} was measured with {name} = {there.get(name)!r}, "
                f"and this run has {ours.get(name)!r}: "
                "give the same flags, or name another file"
            )


def _parsed(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict):
        raise SystemExit(f"{path}:{number}: this line is broken; remove the file to start anew")
    return record
