"""The wheel in an environment of its own, away from the clone: all of it, and what works without torch.

The environment takes the distributions that Outrider needs from the environment of the tests. So nothing is
downloaded; tests/repository/test_packaging.py compares what the wheel declares with what it imports.
"""

import json
import subprocess
from pathlib import Path

import pytest

from outrider.client import Client
from tests.integration.live import Up
from tests.wheel.conftest import ROOT, said_by

pytestmark = [pytest.mark.slow, pytest.mark.wheel]


def test_the_embedded_pair_is_in_the_wheel_and_completes_text(up: Up, programs: Path) -> None:
    ask = {"max_tokens": 24, "temperature": 0.0}
    with Client(up.address) as client:
        model = client.models()[0]
        assert model.name == "target"
        assert "eagle" in model.sources, "the embedded head is in the wheel too"
        drafted, plain = (client.generate("def add(", **ask, speculation=on) for on in (True, False))
    assert drafted.ids == plain.ids
    assert len(plain.ids) == 24
    for pid in up.children().values():
        assert Path(f"/proc/{pid}/cmdline").read_bytes().startswith(bytes(programs))


def test_the_client_and_the_commands_need_no_torch(
    up: Up, programs: Path, without_torch: dict[str, str], tmp_path: Path
) -> None:
    ask = ["--prompt", "def add(", "--max-tokens", "8", "--temperature", "0", "--json"]
    answer = said_by(
        [programs / "outrider", "generate", "--address", up.address, *ask], without_torch, tmp_path
    )
    assert len(json.loads(answer.splitlines()[-1])["ids"]) == 8
    program = f"""
import outrider, sys
with outrider.Client({up.address!r}) as client:
    print(client.generate("def add(", max_tokens=8, temperature=0).text)
assert {str(ROOT)!r} not in outrider.__file__
"""
    assert said_by([programs / "python", "-c", program], without_torch, tmp_path)


def test_up_without_torch_says_what_to_install(
    programs: Path, without_torch: dict[str, str], tmp_path: Path
) -> None:
    done = subprocess.run(
        [programs / "outrider", "up"],
        cwd=tmp_path,
        env=without_torch,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 1
    assert "pip install 'outrider[serve]'" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
