"""The documents' example programs, run in front of real services."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from outrider.client import Client
from outrider.runtime.children import ServiceProcess, stop_all
from tests.integration.live import ROOT, Up, until

EXAMPLES = ROOT / "docs" / "examples"
REQUEST = {"ids": [5, 9, 30, 41], "max_tokens": 240, "ignore_eos": True}
LIKELY = {21: 12.0, 23: 12.0}
"""Makes so random a model repeat itself."""


def run(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / name), *arguments],
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_blocking_client(up: Up) -> None:
    said = run("ask.py", up.address)
    assert "refused: temperature is -1" in said
    assert any(line in ("yes", "no") for line in said.splitlines())


def test_the_asyncio_client(up: Up, client: Client) -> None:
    said = run("ask_async.py", up.address)
    assert str([model.name for model in client.models()]) in said


def test_the_stubs_alone(up: Up) -> None:
    said = run("ask_raw.py", up.address)
    assert "seed 7" in said
    assert "because of FINISH_REASON_" in said


def test_generation_with_passages(up: Up, tiny_llama: Path) -> None:
    assert "ids equal to those of the plain loop: True" in run("rag.py", up.address, str(tiny_llama))


@pytest.mark.slow
def test_generation_with_passages_by_the_embedded_pair() -> None:
    assert "ids equal to those of the plain loop: True" in run("rag.py")


@pytest.mark.slow
def test_contrastive_decoding_by_the_embedded_pair() -> None:
    assert run("contrast.py").count("ids equal to those without drafts: True") == 2


def test_every_example_is_run() -> None:
    tests = Path(__file__).parents[1]
    text = "".join(path.read_text() for path in tests.rglob("test_*.py"))
    assert [path.name for path in EXAMPLES.glob("*.py") if f'"{path.name}"' not in text] == []


@contextmanager
def last_time() -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, "-u", str(EXAMPLES / "last_time.py"), "127.0.0.1:0"],
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.communicate(timeout=200)


@pytest.mark.parametrize("temperature", [0.0, 0.3])
def test_a_source_in_thirty_lines_changes_no_id(tiny_llama: Path, temperature: float) -> None:
    with last_time() as address, ExitStack() as held:

        def started(role: str, module: str, *flags: str) -> ServiceProcess:
            service = ServiceProcess.start(role, module, ["--bind", "127.0.0.1:0", *flags])
            held.callback(stop_all, [service], 5.0)
            service.wait_ready(250.0)
            return service

        # Under a fixed budget a source that comes late, as on a busy machine, is not left alone.
        target = ("--model", str(tiny_llama), "--budget", "fixed", "--passes", "eager", "--kv-mb", "64")
        verifier = started("verifier", "verifier_service", *target)
        front = started("orchestrator", "orchestrator", "--verifier", verifier.address, "--drafter", address)
        with Client(front.address) as client:
            until(lambda: any("last-time" in model.sources for model in client.models()))
            request = {**REQUEST, "temperature": temperature, "seed": 4, "logit_bias": LIKELY}
            plain = client.generate(**request, speculation=False)
            assert client.generate(**request).ids == plain.ids

            def drafted() -> bool:
                """So small a target is done before a busy machine has dialled the source."""
                answer = client.generate(**request, sources=["last-time"])
                assert answer.ids == plain.ids
                accepted = answer.usage.accepted_by_source.get("last-time", 0)
                return accepted > 0

            until(drafted)
