"""How a command says that it failed: in words on standard error, or as one JSON line on standard output.

Knows nothing of any command. Imports nothing heavy: it is on the way of `outrider --help`.
"""

import json
import sys
from typing import NoReturn

FAILED, USAGE, INTERRUPTED = 1, 2, 130


class CommandFailed(Exception):
    """A command could not do what it was told. `code` is the name of a gRPC status."""

    def __init__(self, message: str, code: str = "FAILED_PRECONDITION", status: int = FAILED) -> None:
        super().__init__(message)
        self.code = code
        self.status = status


def usage(message: str) -> CommandFailed:
    """The flags make no sense together."""
    return CommandFailed(message, "INVALID_ARGUMENT", USAGE)


def fail(failure: CommandFailed, *, as_json: bool) -> NoReturn:
    """Say it and end the process."""
    if as_json:
        print(json.dumps({"error": {"code": failure.code, "message": str(failure)}}), flush=True)
    else:
        print(f"error: {failure}", file=sys.stderr, flush=True)
    raise SystemExit(failure.status)
