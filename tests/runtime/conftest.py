"""The toy service as a child process."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from outrider.runtime.children import ROOT, ServiceProcess, stop_all

HERE = Path(__file__).parent

StartToy = Callable[..., ServiceProcess]


@pytest.fixture
def start_toy(tmp_path: Path) -> Iterator[StartToy]:
    """Starts a toy with these flags; by default waits until it is ready."""
    children: list[ServiceProcess] = []

    def start(*flags: str, wait: bool = True, module: str = "toy_service") -> ServiceProcess:
        env = {"PYTHONPATH": os.pathsep.join((str(HERE), str(ROOT)))}
        child = ServiceProcess.start("drafter", module, flags, env=env, log_path=tmp_path / "toy.log")
        children.append(child)
        if wait:
            child.wait_ready(20)
        return child

    yield start
    stop_all(children, 5)
