"""Logs on standard error, one line per event, plain or JSON.

An event's fields go in `extra`: `log.info("stream lost", extra={"fields": {"peer": peer}})`; to them come
those that are bound to the running task (`outrider.wire.origin`): request, tenant, session. Prompts, what
is generated and secrets are never among them. Standard output is never written to.
"""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

from outrider.wire.origin import bound_fields

Format = Literal["plain", "json"]
Level = Literal["debug", "info", "warning", "error"]


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields = getattr(record, "fields", {})
    return {**bound_fields(), **fields} if isinstance(fields, dict) else {**bound_fields()}


def escaped(text: str) -> str:
    """The same on one line and without control characters: what a peer sent must not look like an event."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text
    )


class PlainFormatter(logging.Formatter):
    """12:00:00.000 verifier INFO verifier_service.engine: message field=value

    What is no printable character is escaped. A trace follows on lines of its own, each of them indented.
    """

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created).strftime("%H:%M:%S.%f")[:-3]
        fields = "".join(f" {key}={value}" for key, value in _fields(record).items())
        line = f"{time} {self._role} {record.levelname} {record.name}: {record.getMessage()}{fields}"
        trace = self.formatException(record.exc_info).splitlines() if record.exc_info else ()
        return "\n".join([escaped(line), *(f"  {escaped(part)}" for part in trace)])


class JsonFormatter(logging.Formatter):
    """One object per line: time (UTC), role, level, logger, message, the event's fields, error."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "role": self._role,
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {key: value for key, value in _fields(record).items() if key not in line}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure(role: str, level: Level, format_: Format, stream: TextIO | None = None) -> None:
    """Sends every logger of this process to `stream` (standard error), once per process.

    Libraries that were imported before, and have brought handlers of their own to the terminal, lose these:
    what they say would be told twice, or in another form.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(role) if format_ == "json" else PlainFormatter(role))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for logger in list(root.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger):
            _leave_to_root(logger)


def _leave_to_root(logger: logging.Logger) -> None:
    own = [handler for handler in logger.handlers if type(handler) is logging.StreamHandler]
    for handler in own:
        if handler.stream in (sys.stderr, sys.stdout):
            logger.removeHandler(handler)
            logger.propagate = True
