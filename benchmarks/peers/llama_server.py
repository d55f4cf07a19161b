"""A running server of llama.cpp: starts the program, waits until the model is loaded, sends completions."""

import concurrent.futures
import contextlib
import http.client
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.shared.envelope import REPOSITORY, module_command

PROGRAM = "llama-server"
START_S = 60.0
ANSWER_S = 300.0


def find_program(path: str | None, program: str = PROGRAM) -> str | None:
    """The path of a program of llama.cpp: the given one, or the one on PATH; None where there is none.

    Exits where a path is given that no program has.
    """
    if path is None:
        return shutil.which(program)
    if (found := shutil.which(path)) is None:
        raise SystemExit(f"--{program} {path}: there is no program at this path")
    return found


def version_of(program: str) -> str:
    """The first line of what the program says about its version."""
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    return (done.stderr + done.stdout).strip().splitlines()[0]


class LlamaServer:
    """One process of llama.cpp's server, which ends with the benchmark."""

    def __init__(self, program: str, model: Path, streams: int, threads: int, flags: Sequence[str]) -> None:
        """Starts a server of `streams` slots with this many compute threads and returns at once."""
        self._port = _free_port()
        self._command = [
            *module_command("shared.die_with_parent", str(os.getpid()), program),
            *("--model", str(model), "--host", "127.0.0.1", "--port", str(self._port)),
            *("--parallel", str(streams), "--threads", str(threads), "--no-webui", "--log-disable"),
            *flags,
        ]
        self._process = subprocess.Popen(self._command, cwd=REPOSITORY, stdout=subprocess.DEVNULL)

    @property
    def url(self) -> str:
        """http://HOST:PORT of the server."""
        return f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()

    def wait_ready(self) -> None:
        """Returns when the model is loaded; exits where the program ends or takes longer than START_S."""
        ends = time.monotonic() + START_S
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > ends:
                raise SystemExit(f"{' '.join(self._command)} did not start; its message is above")
            time.sleep(0.05)

    def complete(self, requests: Sequence[dict[str, Any]]) -> tuple[list[tuple[int, ...]], float]:
        """Ids of completions that are requested at once, and the seconds until the last one is there."""
        with (
            concurrent.futures.ThreadPoolExecutor(len(requests)) as pool,
            contextlib.ExitStack() as closing,
        ):
            connections = [closing.enter_context(contextlib.closing(self._connect())) for _ in requests]
            bodies = [json.dumps(request) for request in requests]
            started = time.perf_counter()
            made = list(pool.map(_ask, connections, bodies))
            return made, time.perf_counter() - started

    def _connect(self) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=ANSWER_S)
        connection.connect()
        return connection

    def _is_ready(self) -> bool:
        try:
            with contextlib.closing(self._connect()) as connection:
                connection.request("GET", "/health")
                return connection.getresponse().status == 200
        except OSError:
            return False


def _ask(connection: http.client.HTTPConnection, body: str) -> tuple[int, ...]:
    connection.request("POST", "/completion", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    answer = json.loads(response.read())
    if response.status != 200:
        raise SystemExit(f"{PROGRAM} answered {response.status}: {answer}")
    return tuple(answer["tokens"])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
