"""Logs on standard error, one line per event, plain or JSON.

An event's fields go in `extra`: `log.info("stream lost", extra={"fields": {"peer": peer}})`. A line also
carries the fields that are bound to the running task (`outrider.wire.origin`): request, tenant, session. No
field ever holds prompts, generated text or secrets. Nothing is written to standard output.
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
    """A text on one line without control characters, so that a peer's text cannot pass for an event."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text
    )


class PlainFormatter(logging.Formatter):
    """Formats a record as one line, which begins with the time and the process's name.

    An example is `12:00:00.000 verifier INFO verifier_service.engine: message field=value`.

    Characters that are not printable are escaped. A trace follows on indented lines of its own.
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
    """Formats a record as one JSON object: time (UTC), role, level, logger, message, event fields, error."""

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
    """Sends every logger of this process to `stream` (default: standard error); called once per process.

    Handlers that libraries have already attached to the terminal are removed: their events would be printed
    twice, or in another form.
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
