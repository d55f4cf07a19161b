"""The toy service as a child process."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from outrider.runtime.children import ROOT, ServiceProcess, stop_all

HERE = Path(__file__).parent

StartToy = Callable[..., ServiceProcess]


def started(folder: Path, *flags: str, module: str = "toy_service") -> ServiceProcess:
    """A toy that logs into this folder."""
    env = {"PYTHONPATH": os.pathsep.join((str(HERE), str(ROOT)))}
    return ServiceProcess.start("drafter", module, flags, env=env, log_path=folder / "toy.log")


@pytest.fixture(scope="module")
def toy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the toy of all tests logs."""
    return tmp_path_factory.mktemp("toy")


@pytest.fixture(scope="module")
def toy(toy_folder: Path) -> Iterator[ServiceProcess]:
    """A ready toy that tests leave running."""
    child = started(toy_folder)
    try:
        child.wait_ready(200)
        yield child
    finally:
        stop_all([child], 5)


@pytest.fixture
def start_toy(tmp_path: Path) -> Iterator[StartToy]:
    """Starts a toy with these flags; by default waits until it is ready."""
    children: list[ServiceProcess] = []

    def start(*flags: str, wait: bool = True, module: str = "toy_service") -> ServiceProcess:
        child = started(tmp_path, *flags, module=module)
        children.append(child)
        if wait:
            child.wait_ready(200)
        return child

    yield start
    stop_all(children, 5)
