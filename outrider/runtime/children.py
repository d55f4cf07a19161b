"""Starts services as child processes, waits until they are ready, and stops them.

A child leads a process group of its own, so that Ctrl-C reaches the parent alone, which then stops its
children in order; and it is tied to the parent, so that it ends even when the parent is killed.
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
LAST_WORDS = 2_000


class ServiceFailed(Unavailable):
    """A child gave up before it was ready; `code` is what it announced, or UNAVAILABLE."""

    def __init__(self, message: str, role: str, code: str = "UNAVAILABLE") -> None:
        super().__init__(message)
        self.role = role
        self.code = code


class ServiceProcess:
    """One service as a child of this process."""

    def __init__(self, role: str, process: subprocess.Popen[bytes], log_path: Path | None) -> None:
        self.role = role
        self.address = ""
        """host:port of its gRPC server; empty until it is ready."""
        self.metrics = ""
        """host:port of its metrics; empty until it is ready."""
        self.http = ""
        """URL of its HTTP front; empty until it is ready, and where it has none."""
        self.registry = ""
        """host:port where workers register with it, likewise."""
        self._process = process
        self._log_path = log_path

    @classmethod
    def start(
        cls,
        role: str,
        module: str,
        arguments: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        log_path: Path | None = None,
    ) -> "ServiceProcess":
        """Runs `python -m module --parent-pid ... arguments`; it logs to `log_path`, else where we do.

        Only from the main thread: the kernel ties a child to the thread that started it.
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
        """Exit status, or None while it runs."""
        return self._process.poll()

    def wait_ready(self, timeout_s: float) -> None:
        """Waits for its announcement. Raises ServiceFailed, with the child's own message if it gave one."""
        line = self._first_line(time.monotonic() + timeout_s)
        if line is None:
            raise ServiceFailed(
                f"{self.role} was not ready within {timeout_s:g} s{self._last_words()}", self.role
            )
        said = _object(line)
        if "error" in said:
            raise ServiceFailed(said["error"]["message"], self.role, said["error"]["code"])
        if "address" not in said:
            status = self._wait(5.0)
            ended = "is still running" if status is None else f"ended with exit status {status}"
            raise ServiceFailed(f"{self.role} {ended} without being ready{self._last_words()}", self.role)
        self.address, self.metrics, self.http = said["address"], said["metrics"], said.get("http", "")
        self.registry = said.get("registry", "")

    def terminate(self) -> None:
        """Asks it to stop; returns at once."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    def stop(self, grace_s: float) -> int:
        """Asks it to stop, kills it after the grace; returns its exit status. May be called again."""
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

    def _first_line(self, deadline: float) -> bytes | None:
        """Its first line of output; empty where it ended without one, None at the deadline."""
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        said = b""
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while b"\n" not in said:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    return None
                part = os.read(descriptor, 65_536)
                if not part:
                    break
                said += part
        return said.partition(b"\n")[0]

    def _last_words(self) -> str:
        if self._log_path is None:
            return ""
        tail = self._log_path.read_bytes()[-LAST_WORDS:].decode("utf-8", "replace").strip()
        return f"; the end of {self._log_path}:\n{tail}" if tail else ""


def stop_all(children: Iterable[ServiceProcess], grace_s: float) -> None:
    """Stops them together; none is left when this returns."""
    children = list(children)
    for child in children:
        child.terminate()
    deadline = time.monotonic() + grace_s
    for child in children:
        child.stop(max(0.0, deadline - time.monotonic()))


@contextlib.contextmanager
def reserved_address() -> Iterator[str]:
    """host:port of this machine that stays ours meanwhile: bound here without listening, so that only a child
    that asks for it by number can serve on it, now or when it is started again."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{holder.getsockname()[1]}"


def _python_path() -> str:
    """The child must find the packages that this process found, wherever it was started from."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def _object(line: bytes) -> dict[str, Any]:
    try:
        said = json.loads(line)
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}
