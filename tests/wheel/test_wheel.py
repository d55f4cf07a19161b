"""The wheel in an environment of its own, away from the clone: all of it, and what works without torch.

The environment takes the distributions that Outrider needs from the environment of the tests. So nothing is
downloaded; tests/repository/test_packaging.py compares what the wheel declares with what it imports.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.client import Client
from tests.integration.live import Up

pytestmark = [pytest.mark.slow, pytest.mark.wheel]
ROOT = Path(__file__).resolve().parents[2]
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
ABSENT = ("torch", "transformers")


@pytest.fixture(scope="module")
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


@pytest.fixture(scope="module")
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


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables of a user who has nothing of ours set."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OUTRIDER", "PYTHON"))}
    return {**kept, "HOME": str(tmp_path_factory.mktemp("home"))}


@pytest.fixture(scope="module")
def without_torch(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The same variables, and a start of the interpreter after which torch and transformers are not found."""
    folder = tmp_path_factory.mktemp("absent")
    (folder / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({ABSENT!r}))\n")
    return {**environment, "PYTHONPATH": str(folder)}


@pytest.fixture(scope="module")
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
