"""Reports the failure of a command: in words on standard error, or as one JSON line on standard output.

Knows nothing of any command. Imports nothing heavy at the top: `outrider --help` loads this module.
"""

import errno
import json
import os
import sys
from typing import Annotated, NoReturn, TextIO

import typer

from speculative.errors import OutriderError, Unauthenticated

FAILED, USAGE, INTERRUPTED = 1, 2, 130
"""Exit statuses."""
OUTPUT_ERRORS = frozenset({errno.ENOSPC, errno.EPIPE, errno.EIO, errno.EBADF})
"""Error numbers of a standard output that takes no more text."""
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, errors included.")]
"""The flag of every command that prints a result."""


class CommandFailed(Exception):
    """A command could not do its work. `code` is the name of a gRPC status, `status` the exit status."""

    def __init__(self, message: str, code: str = "FAILED_PRECONDITION", status: int = FAILED) -> None:
        super().__init__(message)
        self.code = code
        self.status = status


def usage(message: str) -> CommandFailed:
    """The failure of a command whose flags are wrong or contradict each other."""
    return CommandFailed(message, "INVALID_ARGUMENT", USAGE)


def standard_input() -> TextIO:
    """Standard input. Raises CommandFailed where the process was started without it."""
    if sys.stdin is None:
        raise CommandFailed("standard input is closed: pipe the text in, or name a file")
    return sys.stdin


def lose_output(error: OSError) -> CommandFailed:
    """The failure for a standard output that takes no more text (a full disk, a closed pipe).

    Points standard output at /dev/null, so that the interpreter can flush it at exit.
    """
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    return CommandFailed(f"standard output cannot be written: {error.strerror}", "UNAVAILABLE")


def status_name(error: OutriderError) -> str:
    """The name of an error's gRPC status: as the peer sent it, else by the error's class."""
    import grpc

    from outrider.runtime.children import ServiceFailed
    from outrider.wire.status import status_of

    if isinstance(error, ServiceFailed):
        return error.code
    cause = error.__cause__
    code = cause.code() if isinstance(cause, grpc.Call) else status_of(error).code
    return str(code.name)


def with_advice(error: OutriderError) -> str:
    """The error's message, and what to do about it on the command line."""
    if isinstance(error, Unauthenticated):
        return f"{error} (on the command line: --api-key-file, or OUTRIDER_API_KEY)"
    return str(error)


def fail(failure: CommandFailed, *, as_json: bool) -> NoReturn:
    """Prints the failure and ends the process."""
    if as_json and sys.stdout is not None:
        print(json.dumps({"error": {"code": failure.code, "message": str(failure)}}), flush=True)
    elif sys.stderr is not None:
        print(f"error: {failure}", file=sys.stderr, flush=True)
    raise SystemExit(failure.status)
