"""The commands of the README end as they say: exact statuses, one interrupt, one line for what is missing."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from source import ROOT

from tests.integration.live import heed_interrupts

# In place of the demonstration: ends with $STATUS at once, or waits for an interrupt and counts them.
FAKE = """
import os, signal, sys, time
count = 0
def interrupted(*_):
    global count
    count += 1
signal.signal(signal.SIGINT, interrupted)
print("running", flush=True)
if "STATUS" in os.environ:
    sys.exit(int(os.environ["STATUS"]))
while not count:
    time.sleep(0.01)
time.sleep(0.5)
print("interrupted", count, flush=True)
sys.exit(130)
"""


@pytest.fixture(autouse=True)
def _not_below_another_make(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "MAKEOVERRIDES"):
        monkeypatch.delenv(name, raising=False)


def executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone with the Makefile, its launcher and a stand-in for the demonstration; nothing to install."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copy(ROOT / "scripts/run", tmp_path / "scripts")
    (tmp_path / "fake.py").write_text(FAKE)
    executable(tmp_path / "scripts/setup", "#!/bin/sh\n")
    executable(tmp_path / ".venv/bin/outrider", f"#!/bin/sh\nexec {sys.executable} fake.py\n")
    return tmp_path


def ended(clone: Path, status: int, *command: str) -> tuple[int, str]:
    """Exit status and output of a command whose demonstration ends with this status."""
    run = subprocess.run(
        command,
        cwd=clone,
        env={**os.environ, "STATUS": str(status)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    return run.returncode, run.stdout


@pytest.mark.parametrize("status", [0, 1, 2])
def test_the_launcher_ends_with_the_status_of_the_demonstration(clone: Path, status: int) -> None:
    assert ended(clone, status, "scripts/run") == (status, "running\n")


@pytest.mark.parametrize("flags", [[], ["-s"], ["-j2"], ["TORCH_INDEX_URL=x"]], ids=" ".join)
@pytest.mark.parametrize(("status", "of_make"), [(0, 0), (1, 2), (2, 2)])
def test_make_run_fails_as_make_does_where_the_demonstration_fails(
    clone: Path, flags: list[str], status: int, of_make: int
) -> None:
    assert ended(clone, status, "make", *flags, "run") == (of_make, "running\n")


@pytest.mark.parametrize("flag", ["-n", "-q", "-t"])
def test_make_run_starts_nothing_in_a_dry_run(clone: Path, flag: str) -> None:
    assert "running" not in ended(clone, 0, "make", flag, "run")[1]


@pytest.fixture
def running(clone: Path) -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen(
        ["make", "run"],
        cwd=clone,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=heed_interrupts,
    ) as make:
        assert make.stdout is not None
        assert make.stdout.readline() == "running\n"
        yield make
        if make.poll() is None:
            os.killpg(make.pid, signal.SIGKILL)


def test_an_interrupt_from_a_terminal_arrives_once_and_make_ends_as_interrupted(
    running: "subprocess.Popen[str]",
) -> None:
    os.killpg(running.pid, signal.SIGINT)
    out, _ = running.communicate(timeout=200)
    assert out == "interrupted 1\n"
    assert running.returncode == -signal.SIGINT  # a shell says 130


def test_a_request_to_terminate_reaches_the_demonstration(running: "subprocess.Popen[str]") -> None:
    running.terminate()
    out, _ = running.communicate(timeout=200)  # ends only when nobody has standard output any more
    assert (out, running.returncode) == ("", -signal.SIGTERM)


@pytest.mark.parametrize("python", ["false", "/nowhere/python3"])
def test_a_python_that_does_not_fit_is_refused_in_one_line(tmp_path: Path, python: str) -> None:
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    for file in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / file, tmp_path)
    run = subprocess.run(
        [tmp_path / "scripts/setup", "run"],
        env={**os.environ, "PYTHON": python},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert run.returncode == 1
    assert run.stderr.startswith("outrider: Python 3.11 or 3.12 is needed; ")
    assert run.stderr.count("\n") == 1
    assert not (tmp_path / ".venv").exists()


def test_make_alone_lists_what_there_is() -> None:
    run = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, timeout=200, check=True)
    listed = {line.split()[0] for line in run.stdout.splitlines()}
    assert listed >= {"help", "run", "test", "lint", "proto", "bench"}
