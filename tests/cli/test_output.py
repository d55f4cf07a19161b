"""A command whose standard streams cannot be used fails with one line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VERSION = [sys.executable, "-m", "outrider.cli", "version", "--json"]


def test_a_full_disk_is_one_line_and_a_failure() -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(VERSION, stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT, timeout=200)
    assert done.returncode == 1
    assert done.stderr.splitlines() == ["error: standard output cannot be written: No space left on device"]


def test_a_closed_standard_output_is_a_failure_where_an_answer_would_be_lost() -> None:
    command = [sys.executable, "-m", "outrider.cli", "generate", "--address", "127.0.0.1:1", "--prompt", "x"]
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *command],
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        timeout=200,
    )
    assert done.returncode == 1
    assert "standard output is closed" in done.stderr


def test_a_character_that_the_terminal_lacks_does_not_end_an_answer() -> None:
    code = "from outrider.cli.app import main; main(['version'])"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; import atexit; atexit.register(print, '\\xe9'); {code}"],
        capture_output=True,
        env=environment,
        cwd=ROOT,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert b"?" in done.stdout


@pytest.mark.parametrize(
    "words", ["top -", "index build corpus --stdin --tokenizer models/target", "chat --address 127.0.0.1:1"]
)
def test_a_closed_standard_input_is_said_in_one_line(words: str) -> None:
    done = closed("<&-", words)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: standard input is closed")
    assert "Traceback" not in done.stderr


def test_a_service_starts_without_a_standard_output() -> None:
    words = "serve retrieval --bind 127.0.0.1:0 --metrics-bind 127.0.0.1:0"
    with subprocess.Popen(without(">&-", words), stderr=subprocess.PIPE, text=True, cwd=ROOT) as service:
        assert service.stderr is not None
        lines: list[str] = []
        while not (lines and lines[-1].endswith(" ready\n")) and (line := service.stderr.readline()):
            lines.append(line)
        service.terminate()
        lines += service.stderr.readlines()
    assert service.returncode == 0, "".join(lines)
    assert "Traceback" not in "".join(lines)


def closed(redirection: str, words: str) -> subprocess.CompletedProcess[str]:
    """Runs a command without one of its standard streams."""
    return subprocess.run(
        without(redirection, words),
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        timeout=200,
        check=False,
    )


def without(redirection: str, words: str) -> list[str]:
    """The command line of a command without one of its standard streams."""
    command = [sys.executable, "-m", "outrider.cli", *words.split()]
    return ["sh", "-c", f'exec "$@" {redirection}', "sh", *command]
