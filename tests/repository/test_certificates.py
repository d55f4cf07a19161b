"""scripts/certificates makes certificates that services accept."""

import shutil
import subprocess
from pathlib import Path

import pytest
from source import ROOT

from outrider.wire.tls import Certificates, Files

ROLES = ("orchestrator", "verifier", "drafter", "retrieval", "operator")


def make(folder: Path) -> None:
    subprocess.run([ROOT / "scripts/certificates", folder, "5"], check=True, capture_output=True, timeout=200)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="the script calls openssl")
def test_each_role_gets_a_certificate_that_can_be_replaced(tmp_path: Path) -> None:
    make(tmp_path)
    authority = (tmp_path / "ca.crt").read_bytes()
    taken = {}
    for role in ROLES:
        paths = (tmp_path / f"{role}.crt", tmp_path / f"{role}.key", tmp_path / "ca.crt")
        for server in (True, False):
            taken[role] = Certificates(Files(*paths, server=server, own_ca=True), every_s=0.0)
        assert paths[1].stat().st_mode & 0o077 == 0, "a key is for its owner alone"
    before = {role: it.current() for role, it in taken.items()}
    make(tmp_path)
    assert (tmp_path / "ca.crt").read_bytes() == authority
    assert all(it.current() is not before[role] for role, it in taken.items())
