"""Starts services as child processes, waits until they are ready, and stops them.

Every child has a process group of its own: Ctrl-C reaches the parent alone, and the parent stops its children
in order. The kernel ties every child to its parent, so that a child ends even when the parent is killed.
"""

import contextlib
import json
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from speculative.errors import Unavailable

ROOT = Path(__file__).resolve().parents[2]
ENDING_S = 5.0
"""Seconds that a child whose output has ended may take to end itself."""
LAST_WORDS = 2_000
"""Bytes at the end of a child's log that an error quotes."""


class ServiceFailed(Unavailable):
    """A child ended before it was ready; `code` is the status name that it announced, or UNAVAILABLE."""

    def __init__(self, message: str, role: str, code: str = "UNAVAILABLE") -> None:
        super().__init__(message)
        self.role = role
        self.code = code


class ServiceProcess:
    """A service that runs as a child process."""

    def __init__(self, role: str, process: subprocess.Popen[bytes], log_path: Path | None) -> None:
        self.role = role
        self.address = ""
        """host:port of the service's gRPC server; empty until the service is ready."""
        self.metrics = ""
        """host:port of the service's metrics; empty until the service is ready."""
        self.http = ""
        """URL of the service's HTTP front; empty until the service is ready, and where it has none."""
        self.registry = ""
        """host:port at which workers register; empty until the service is ready, or without a registry."""
        self.loaded = 0
        """Tensors of the service's model that are loaded."""
        self.of = 0
        """Tensors of the service's model; 0 until the service begins to load them."""
        self._process = process
        self._log_path = log_path
        self._unread = b""

    @classmethod
    def start(
        cls,
        role: str,
        module: str,
        arguments: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        log_path: Path | None = None,
    ) -> "ServiceProcess":
        """Runs `python -m module --parent-pid ... arguments`, logging to `log_path` or this process's stderr.

        Call it from the main thread: the kernel ties a child to the thread that started it.
        """
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                f"{role} must be started from the main thread, not {threading.current_thread()}"
            )
        command = [sys.executable, "-P", "-m", module, "--parent-pid", str(os.getpid()), *arguments]
        with contextlib.ExitStack() as files:
            log_file = files.enter_context(log_path.open("ab")) if log_path else None
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log_file,
                env={**os.environ, "PYTHONPATH": _python_path(), **(env or {})},
                process_group=0,
            )
        return cls(role, process, log_path)

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """The child's exit status; None while it runs."""
        return self._process.poll()

    def wait_ready(self, timeout_s: float) -> None:
        """Waits for the child to be ready. Raises ServiceFailed, with the message that the child sent.

        `timeout_s` bounds the time in which the child says nothing, not even that its model loads.
        """
        while not self.ready:
            if not self.hear(timeout_s):
                raise ServiceFailed(
                    f"{self.role} was not ready within {timeout_s:g} s{self._last_words()}", self.role
                )

    @property
    def ready(self) -> bool:
        """Whether the service has announced that it is ready for requests."""
        return bool(self.address)

    def hear(self, timeout_s: float, ending_s: float = ENDING_S) -> bool:
        """Takes in the child's next announcement; returns whether one came within `timeout_s` seconds.

        Raises ServiceFailed where the child gave up, with the message that the child sent. A child that sent
        none is waited for, at most `ending_s` seconds, for its exit status.
        """
        line = self._next_line(time.monotonic() + timeout_s)
        if line is None:
            return False
        announced = _object(line)
        if "loaded" in announced:
            self.loaded, self.of = announced["loaded"], announced["of"]
            return True
        if "error" in announced:
            raise ServiceFailed(announced["error"]["message"], self.role, announced["error"]["code"])
        if "address" not in announced:
            status = self._wait(ending_s)
            ended = "is still running" if status is None else f"ended with exit status {status}"
            raise ServiceFailed(f"{self.role} {ended} without being ready{self._last_words()}", self.role)
        self.address, self.metrics = announced["address"], announced["metrics"]
        self.http, self.registry = announced.get("http", ""), announced.get("registry", "")
        return True

    def catch_up(self) -> int | None:
        """As `poll`, but first takes in what a child for which nobody waits has announced by now.

        The child would stand still as soon as its announcements fill the pipe.
        """
        with contextlib.suppress(ServiceFailed):
            while not self.ready and self.poll() is None and self.hear(0.0, 0.0):
                pass
        return self.poll()

    def terminate(self) -> None:
        """Sends the child SIGTERM; returns at once."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    def stop(self, grace_s: float) -> int:
        """Sends SIGTERM, kills the child after `grace_s` seconds, returns its exit status. Repeatable."""
        self.terminate()
        if self._wait(grace_s) is None:
            self._process.kill()
        status = self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        return status

    def _wait(self, timeout_s: float) -> int | None:
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def _next_line(self, deadline: float) -> bytes | None:
        """The child's next line of output; empty if the child ended, None at the deadline."""
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    return None
                part = os.read(descriptor, 65_536)
                if not part:
                    break
                self._unread += part
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _last_words(self) -> str:
        if self._log_path is None:
            return ""
        tail = self._log_path.read_bytes()[-LAST_WORDS:].decode("utf-8", "replace").strip()
        return f"; the end of {self._log_path}:\n{tail}" if tail else ""


def stop_all(children: Iterable[ServiceProcess], grace_s: float) -> None:
    """Stops all children together and returns when every one has ended."""
    children = list(children)
    for child in children:
        child.terminate()
    deadline = time.monotonic() + grace_s
    for child in children:
        child.stop(max(0.0, deadline - time.monotonic()))


@contextlib.contextmanager
def reserved_address() -> Iterator[str]:
    """Reserves a free host:port of this machine for a child, also for a child that is started again.

    The port is bound but not listening, so that only a child that names the port can serve on it.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{holder.getsockname()[1]}"


def _python_path() -> str:
    """PYTHONPATH of a child, which must find the packages of this process in any working directory."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def _object(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
