"""`outrider up` itself: what it refuses, and that nothing outlives it."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outrider.client import Client
from tests.certificates import Authority
from tests.in_time import in_time
from tests.integration.live import Up, start_demo, start_up, until
from tests.orchestrator.fronts import write_keys


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_children_die_with_an_up_that_is_killed(tiny_llama: Path, tmp_path: Path) -> None:
    up = start_up("--target", str(tiny_llama), log=tmp_path / "stderr")
    up.wait_ready()
    try:
        roles = [process["role"] for process in up.processes]
        assert roles == ["verifier", "retrieval", "orchestrator"], "no drafter"
        with Client(up.address) as client:
            assert len(client.generate(ids=[5], max_tokens=3).ids) <= 3
    finally:
        up.process.send_signal(signal.SIGKILL)
        up.stop()
    until(lambda: not any(alive(process["pid"]) for process in up.processes))


@pytest.mark.slow
def test_a_head_and_a_drafter_draft_together_and_are_explained_by_name(
    tiny_llama: Path, tiny_llama_b: Path, tmp_path: Path
) -> None:
    head = f"mine={saved_head(tiny_llama, tmp_path / 'head')}"
    flags = ("--drafter", str(tiny_llama_b), "--heads", head, "--retrieval", "none")
    up = start_up("--target", str(tiny_llama), *flags, log=tmp_path / "stderr")
    asked: dict[str, Any] = {"ids": [5, 9, 30], "max_tokens": 200, "temperature": 0.8, "seed": 3}
    try:
        up.wait_ready()
        with Client(up.address) as client:
            assert {"drafter", "mine"} <= set(client.models()[0].sources)
            plain = client.generate(**asked, ignore_eos=True, speculation=False)
            drafted = client.generate(**asked, ignore_eos=True)
            assert drafted.ids == plain.ids
            (explained,) = client.explain(drafted.session).incarnations
        assert {"drafter", "mine"} <= set(explained.source_names)
        mine = list(explained.source_names).index("mine") + 1
        shares = [share for each in explained.rounds for share in each.by_source if share.source == mine]
        in_time(sum(share.drafted for share in shares) > 0)
    finally:
        assert up.stop() == 0


def saved_head(target: Path, path: Path) -> Path:
    """A random head for the target, in a folder of its own."""
    import torch
    from transformers import AutoModelForCausalLM

    from outrider.lm.heads.medusa import MedusaHeads
    from outrider.lm.heads.published import write_head
    from outrider.lm.heads.target_parts import TargetParts
    from tests.lm.random_heads import shaken

    model = AutoModelForCausalLM.from_pretrained(target, local_files_only=True)
    write_head(shaken(MedusaHeads(TargetParts.of(model), 3)), path, torch.float32)
    return path


def killed_amid_a_stream(up: Up, role_pid: Callable[[], int]) -> None:
    """Kills a process of the verifier amid a stream, whose ids have to equal those of the stream before."""
    asked: dict[str, Any] = {"ids": [5], "max_tokens": 250, "temperature": 0.8, "seed": 3, "ignore_eos": True}
    with Client(up.address) as client:
        whole = client.generate(**asked)
        verifier = up.children()["verifier"]
        with client.stream(**asked) as stream:
            next(stream)
            os.kill(role_pid(), signal.SIGKILL)
            assert stream.completion().ids == whole.ids
        in_time(stream.completion().usage.recoveries == 1, "the stream was over before, or lost again")
        assert up.children()["verifier"] != verifier
        assert client.generate(**asked).ids == whole.ids
    assert "verifier ended with exit status" in up.log()
    assert "verifier was started again" in up.log()
    assert up.process.poll() is None


@pytest.mark.slow
def test_a_verifier_that_is_killed_is_started_again_and_its_streams_go_on(
    tiny_llama: Path, tiny_llama_b: Path, tmp_path: Path
) -> None:
    up = start_up("--target", str(tiny_llama), "--drafter", str(tiny_llama_b), log=tmp_path / "stderr")
    try:
        up.wait_ready()
        killed_amid_a_stream(up, lambda: up.children()["verifier"])
    finally:
        assert up.stop() == 0


@pytest.mark.slow
def test_a_verifier_that_loses_one_of_its_ranks_is_started_again(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_VERIFIER__RANKS", "2")
    up = start_up("--target", str(tiny_llama), "--retrieval", "none", log=tmp_path / "stderr")
    try:
        up.wait_ready()
        killed_amid_a_stream(up, lambda: children_of(up.children()["verifier"])[0])
    finally:
        assert up.stop() == 0


def children_of(parent: int) -> list[int]:
    """Process ids of a process's children."""
    listed = Path(f"/proc/{parent}/task/{parent}/children").read_text()
    return [int(pid) for pid in listed.split()]


@pytest.mark.slow
def test_up_ends_with_its_orchestrator(tiny_llama: Path, tmp_path: Path) -> None:
    flags = ("--drafter", "none", "--retrieval", "none")
    up = start_up("--target", str(tiny_llama), *flags, log=tmp_path / "stderr")
    up.wait_ready()
    os.kill(up.children()["orchestrator"], signal.SIGKILL)
    assert up.process.wait(100) == 1
    assert "orchestrator ended" in up.log() + str(up.first_line())
    assert not any(alive(process["pid"]) for process in up.processes)
    up.stop()


@pytest.mark.slow
def test_a_refused_drafter_is_named_with_its_model_type(tiny_llama: Path, tmp_path: Path) -> None:
    recurrent = save_mamba(tmp_path / "mamba")
    up = start_up("--target", str(tiny_llama), "--drafter", str(recurrent), log=tmp_path / "stderr")
    said = up.first_line()
    assert up.process.wait(100) == 1
    up.stop()
    assert said["error"]["code"] == "FAILED_PRECONDITION"
    assert said["error"]["message"].startswith("drafter: mamba is not served")


def test_a_drafter_of_another_tokenizer_is_refused_before_a_model_is_loaded(
    tiny_llama: Path, tiny_writer: Path, tmp_path: Path
) -> None:
    up = start_up("--target", str(tiny_llama), "--drafter", str(tiny_writer), log=tmp_path / "stderr")
    said = up.first_line()
    assert up.process.wait(100) == 1
    up.stop()
    assert said["error"]["code"] == "FAILED_PRECONDITION"
    assert said["error"]["message"] == (
        f'drafter {tiny_writer} cannot draft for {tiny_llama}: their tokenizers differ: id 2 is "\'" in the '
        "target's and '!' in the drafter's; 278 ids differ, of 96 and 280; give a drafter of the target's "
        "tokenizer, --drafter auto, or --drafter none"
    )
    assert "process" not in up.log(), "no service was started"


def save_mamba(path: Path) -> Path:
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=96, hidden_size=16, num_hidden_layers=1, state_size=4, eos_token_id=1)
    MambaForCausalLM(config).save_pretrained(path)
    return path


def test_ctrl_c_ends_the_demonstration_with_130_and_leaves_nothing(tmp_path: Path) -> None:
    demo = start_demo(tmp_path / "stderr")
    assert demo.process.stdout is not None
    assert demo.process.stdout.readline().startswith(b"a corpus of installed packages")
    assert demo.process.stdout.readline().startswith(b"starting verifier")
    until(lambda: len(demo.children()) == 4)
    pids = list(demo.children().values())
    demo.process.send_signal(signal.SIGINT)
    assert demo.process.wait(100) == 130
    demo.stop()
    until(lambda: not any(alive(pid) for pid in pids))  # the kernel ends one that it had just begun to start


@pytest.mark.slow
def test_an_up_with_keys_and_certificates_everywhere_starts_and_answers(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (key,) = write_keys(tmp_path / "keys", ["ours"])
    authority = Authority(tmp_path / "authority")
    tables = {"orchestrator": {"api_keys_file": tmp_path / "keys", **authority.front()}}
    tables["orchestrator"] |= authority.role("orchestrator")
    tables["verifier"] = authority.role("verifier")
    tables |= {role: authority.role(role, "source") for role in ("drafter", "retrieval")}
    for role, settings in tables.items():
        for name, path in settings.items():
            monkeypatch.setenv(f"OUTRIDER_{role.upper()}__{name.upper()}", str(path))
    up = start_up("--target", str(tiny_llama), "--drafter", str(tiny_llama), log=tmp_path / "stderr")
    try:
        up.wait_ready()
        with Client(up.address, ca=authority.ca, api_key=key) as client:
            assert "drafter" in client.models()[0].sources
            assert len(client.generate(ids=[5], max_tokens=3).ids) <= 3
    finally:
        up.stop()
