"""Starts the processes that handle what is not trusted, such as bodies and checkpoints' templates."""

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


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
