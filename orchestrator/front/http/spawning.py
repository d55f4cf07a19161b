"""Starts and kills the processes that handle what is not trusted, such as bodies and chat templates."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
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
        try:
            streams = await asyncio.open_connection(sock=ours)
        except BaseException:
            ours.close()
            await _end(process)
            raise
        return cls(process, *streams)

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    @property
    def used_up_cpu_time(self) -> bool:
        """Whether the system ended the process, which had used up its processor time; known once closed."""
        return self._process.returncode == -signal.SIGXCPU

    async def close(self) -> None:
        """Kill the process, and wait until it is gone."""
        # Nothing is flushed: a process that no longer reads would never take the rest.
        self._writer.transport.abort()
        await _end(self._process)


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
        await _end(await starting)
        raise


async def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    await asyncio.to_thread(process.wait)


def _spawn(module: str, theirs: socket.socket) -> subprocess.Popen[bytes]:
    # -P: nothing may be imported from the working directory. The environment may hold secrets: it stays here.
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module],
        stdin=theirs.fileno(),
        stdout=subprocess.DEVNULL,
        env={"PYTHONPATH": path},
    )
