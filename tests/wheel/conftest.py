"""The wheel, built once, and an environment in which it is installed beside the tests' own distributions."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.live import Up

ROOT = Path(__file__).resolve().parents[2]
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
ABSENT = ("torch", "transformers")


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the files that git knows: a build leaves files where it runs."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, stdout=subprocess.PIPE)
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name)
    command = (*PIP, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(built), ".")
    subprocess.run(command, cwd=source, check=True)
    (path,) = built.glob("outrider-*-py3-none-any.whl")
    return path


@pytest.fixture(scope="session")
def programs(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of programs of an environment in which the wheel is installed."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    python = folder / "bin/python"
    command = (*PIP, "--python", str(python), "install", "--quiet", "--no-deps", "--no-index", str(wheel))
    subprocess.run(command, check=True)
    # A path in a .pth file brings the packages of that folder and none of its .pth files: not the clone.
    (packages,) = folder.glob("lib/python3.*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    return folder / "bin"


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables of a user who has nothing of ours set."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OUTRIDER", "PYTHON"))}
    return {**kept, "HOME": str(tmp_path_factory.mktemp("home"))}


@pytest.fixture(scope="session")
def without_torch(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The same variables, and a start of the interpreter after which torch and transformers are not found."""
    folder = tmp_path_factory.mktemp("absent")
    (folder / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({ABSENT!r}))\n")
    return {**environment, "PYTHONPATH": str(folder)}


@pytest.fixture(scope="session")
def up(programs: Path, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """A running `outrider up` of the installed wheel, with the embedded pair and a head."""
    folder = tmp_path_factory.mktemp("up")
    log = folder / "stderr"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [programs / "outrider", "up", "--json", "--threads", "1", "--heads", "eagle"],
            stdout=subprocess.PIPE,
            stderr=errors,
            cwd=folder,
            env=environment,
            process_group=0,
        )
    running = Up(process, log)
    try:
        running.wait_ready()
        yield running
    finally:
        assert running.stop() == 0, running.log()


def said_by(command: list[str | Path], environment: dict[str, str], folder: Path) -> str:
    """What a command prints that has to succeed."""
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout
