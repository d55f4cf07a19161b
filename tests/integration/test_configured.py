"""A stack that one file configures: `outrider up --config`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.client import Client
from tests.integration.live import ROOT, start_up


def shown(role: str, **variables: str) -> dict[str, object]:
    command = [sys.executable, "-m", "outrider.cli", "config", "show", role, "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=True)
    return {name: one["value"] for name, one in json.loads(done.stdout)["settings"].items()}


@pytest.mark.slow
def test_one_file_is_read_by_up_and_by_every_service(tiny_llama: Path, tmp_path: Path) -> None:
    file = tmp_path / "outrider.toml"
    file.write_text(
        f'[up]\nretrieval = "none"\n[verifier]\nmodel = "{tiny_llama}"\nmodel_name = "filed"\nkv_mb = 3\n'
        '[orchestrator]\ndefault_max_tokens = 5\nlog_format = "json"\n'
    )
    assert shown("verifier", OUTRIDER_CONFIG=str(file))["model_name"] == "filed"
    up = start_up("--config", str(file), log=tmp_path / "stderr")
    try:
        up.wait_ready()
        assert [process["role"] for process in up.processes] == ["verifier", "orchestrator"]
        with Client(up.address) as client:
            assert [model.name for model in client.models()] == ["filed"]
            assert len(client.generate(ids=[5], ignore_eos=True).ids) == 5
    finally:
        up.stop()


def test_a_service_whose_table_is_wrong_is_named_by_up(tiny_llama: Path, tmp_path: Path) -> None:
    file = tmp_path / "outrider.toml"
    file.write_text(f'[verifier]\nmodel = "{tiny_llama}"\nkv_bm = 3\n')
    up = start_up("--config", str(file), "--retrieval", "none", log=tmp_path / "stderr")
    said = up.first_line()
    assert up.process.wait(100) == 1
    up.stop()
    assert said["error"]["code"] == "INVALID_ARGUMENT"
    assert f"kv_bm ({file}): is no setting; did you mean kv_mb?" in said["error"]["message"]
