"""Client and command line of the wheel on each Python that it declares, with dependencies from an index."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.integration.live import Up
from tests.wheel.conftest import said_by

pytestmark = [pytest.mark.slow, pytest.mark.wheel]
OFFLINE = ("Connection", "Temporary failure in name resolution", "timed out", "from versions: none")
ASK = ["--prompt", "def add(", "--max-tokens", "8", "--temperature", "0", "--json"]


def interpreter(version: str) -> str:
    """A Python of this version; skips the test where the machine has none."""
    name = f"python{version}"
    ours = [str(path) for path in Path.home().glob(f".pyenv/versions/{version}.*/bin/{name}")]
    for found in filter(None, [*ours, shutil.which(name)]):
        if subprocess.run([found, "-c", "import venv, ensurepip"], capture_output=True).returncode == 0:
            return found
    pytest.skip(f"this machine has no Python {version}")


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13", "3.14"])
def test_a_client_of_any_declared_python_gets_the_same_answer(
    version: str, wheel: Path, up: Up, programs: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    subprocess.run([interpreter(version), "-m", "venv", tmp_path / "env"], check=True)
    python = tmp_path / "env/bin/python"
    # Its own pip: that of an older Python, as Debian 12 has it, cannot install for a newer one.
    pip = (python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
    done = subprocess.run(
        (*pip, "--only-binary", ":all:", str(wheel)),
        capture_output=True,
        text=True,
        timeout=280,
    )
    if done.returncode != 0 and any(word in done.stderr for word in OFFLINE):
        pytest.skip(f"no package index answers: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    ask = ["generate", "--address", up.address, *ASK]
    ours, theirs = (
        json.loads(said_by([folder / "outrider", *ask], environment, tmp_path).splitlines()[-1])["ids"]
        for folder in (programs, python.parent)
    )
    assert ours == theirs
    listed = said_by([python.parent / "outrider", "--help"], environment, tmp_path)
    assert "edge" in listed
    said_by([python, "-W", "error", "-c", "import outrider.edge, outrider.client"], environment, tmp_path)
