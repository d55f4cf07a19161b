"""How a command says that it failed: in words on standard error, or as one JSON line on standard output.

Knows nothing of any command. Imports nothing heavy: it is on the way of `outrider --help`.
"""

import errno
import json
import os
import sys
from typing import NoReturn

FAILED, USAGE, INTERRUPTED = 1, 2, 130
OUTPUT_ERRORS = frozenset({errno.ENOSPC, errno.EPIPE, errno.EIO, errno.EBADF})


class CommandFailed(Exception):
    """A command could not do what it was told. `code` is the name of a gRPC status."""

    def __init__(self, message: str, code: str = "FAILED_PRECONDITION", status: int = FAILED) -> None:
        super().__init__(message)
        self.code = code
        self.status = status


def usage(message: str) -> CommandFailed:
    """The flags make no sense together."""
    return CommandFailed(message, "INVALID_ARGUMENT", USAGE)


def lose_output(error: OSError) -> CommandFailed:
    """Standard output takes nothing more (a full disk, a closed pipe): lets it go, to end in silence."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    return CommandFailed(f"standard output cannot be written: {error.strerror}", "UNAVAILABLE")


def fail(failure: CommandFailed, *, as_json: bool) -> NoReturn:
    """Say it and end the process."""
    if as_json and sys.stdout is not None:
        print(json.dumps({"error": {"code": failure.code, "message": str(failure)}}), flush=True)
    elif sys.stderr is not None:
        print(f"error: {failure}", file=sys.stderr, flush=True)
    raise SystemExit(failure.status)
