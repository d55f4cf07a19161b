"""Starts and kills the processes that handle what is not trusted, such as bodies and chat templates."""

import asyncio
import os
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Self

ROOT = Path(__file__).resolve().parents[3]


class KillableProcess:
    """One process, and this end of its socket."""

    MODULE: str
    """The module that the process runs."""

    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(cls) -> Self:
        """Start a process. Raises OSError where the machine has none to spare."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = await spawned(cls.MODULE, theirs)
            except BaseException:
                ours.close()
                raise
        return cls(process, *await asyncio.open_connection(sock=ours))

    async def close(self) -> None:
        """Kill the process, and wait until it is gone."""
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()
        self._process.kill()
        await asyncio.to_thread(self._process.wait)


async def spawned(module: str, theirs: socket.socket) -> subprocess.Popen[bytes]:
    """A new process that runs a module; a caller that stops waiting leaves no process behind.

    Raises OSError where the machine has no process to spare.

    Args:
        theirs: the process's end of a socket, which it gets as standard input.
    """
    starting = asyncio.ensure_future(asyncio.to_thread(_spawn, module, theirs))
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        process = await starting
        process.kill()
        await asyncio.to_thread(process.wait)
        raise


def _spawn(module: str, theirs: socket.socket) -> subprocess.Popen[bytes]:
    # -P: nothing may be imported from the working directory. The environment may hold secrets: it stays here.
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module],
        stdin=theirs.fileno(),
        stdout=subprocess.DEVNULL,
        env={"PYTHONPATH": path},
    )
