"""`outrider memory` with a retrieval worker that requires certificates."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from outrider.cli.app import main
from outrider.runtime.children import ServiceProcess
from tests.certificates import Authority


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


@pytest.fixture
def worker(authority: Authority) -> Iterator[ServiceProcess]:
    files = authority.role("retrieval", "source")
    flags = [part for name, path in files.items() for part in (f"--{name.replace('_', '-')}", str(path))]
    with ExitStack() as held:
        process = ServiceProcess.start("retrieval", "retrieval_service", flags)
        held.callback(process.stop, 10.0)
        process.wait_ready(250)
        yield process


def listed(worker: ServiceProcess, *before: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(["memory", *before, "list", "--address", worker.address])
    assert isinstance(end.value.code, int)
    return end.value.code


def test_a_worker_accepts_an_operator_s_certificate_and_refuses_another_role_s(
    worker: ServiceProcess, authority: Authority, capsys: pytest.CaptureFixture[str]
) -> None:
    def shows(role: str) -> list[str]:
        cert, key, ca = authority.role(role).values()
        return ["--ca", str(ca), "--cert", str(cert), "--cert-key", str(key)]

    assert listed(worker, *shows("operator")) == 0
    assert "no corpora" in capsys.readouterr().out
    assert listed(worker, *shows("drafter")) == 1
    assert "operator.outrider.internal" in capsys.readouterr().err
    assert listed(worker) == 1, "what one command showed the next one does not"
