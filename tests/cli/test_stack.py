"""Decisions of `up` before it starts processes and between two starts."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.cli.failures import CommandFailed
from outrider.cli.local import stack
from outrider.cli.local.demo import run_demo
from outrider.cli.local.stack import MOST_RESTARTS, STEADY_S, Restarts, Stack, check_installed, check_pair
from outrider.cli.local.up_settings import ServiceOverrides, StackOptions
from outrider.learning.from_settings import refuse_unused
from outrider.runtime.settings import read_settings
from outrider.v1.draft_source_pb2 import SourceDescription
from outrider.v1.verifier_pb2 import VerifierDescription
from verifier_service.settings import VerifierSettings


def test_a_target_alone_has_a_drafter_that_is_still_to_be_chosen() -> None:
    assert StackOptions(target="org/name").models() == ("org/name", ("auto",))
    assert StackOptions(target="org/name", drafter="none").models() == ("org/name", ())
    assert StackOptions(target="org/name", drafter="org/small").models() == ("org/name", ("org/small",))
    two = StackOptions(target="org/name", drafter="org/small, org/other")
    assert two.models() == ("org/name", ("org/small", "org/other"))


def test_only_a_stack_with_a_retrieval_worker_needs_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack, "find_spec", lambda name: None if name in stack.RETRIEVAL else object())
    check_installed(retrieval=False)
    with pytest.raises(CommandFailed, match="not installed: pydivsufsort; run: pip install"):
        check_installed(retrieval=True)


@pytest.mark.parametrize(("given", "wanted"), [(None, "ERROR"), ("DEBUG", "DEBUG")])
def test_grpc_logs_no_broken_connections_unless_asked_to(given: str | None, wanted: str) -> None:
    own = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    own |= {} if given is None else {"GRPC_VERBOSITY": given}
    says = "import os, outrider.cli; print(os.environ['GRPC_VERBOSITY'])"
    found = subprocess.run([sys.executable, "-c", says], env=own, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == wanted


@pytest.mark.parametrize("word", ["none", "auto"])
def test_none_and_auto_stand_alone(word: str) -> None:
    with pytest.raises(CommandFailed, match=f"{word} stands alone"):
        StackOptions(target="org/name", drafter=f"org/small,{word}").models()


@pytest.mark.parametrize("names", [",", "org/small,", " "])
def test_a_drafter_without_a_name_is_refused(names: str) -> None:
    with pytest.raises(CommandFailed, match=f"--drafter '{names}' has an empty name"):
        StackOptions(target="org/name", drafter=names).models()


def test_a_path_that_is_not_there_is_found_out_before_anything_starts() -> None:
    with pytest.raises(CommandFailed, match="no model at /nowhere"):
        StackOptions(target="/nowhere").models()
    with pytest.raises(CommandFailed, match="no model at /nowhere"):
        StackOptions(target="org/name", drafter="/nowhere").models()


@pytest.mark.parametrize(
    ("cores", "drafters", "counts"),
    [
        (1, 1, (1, 1)),
        (2, 1, (1, 1)),
        (2, 2, (1, 1)),
        (4, 1, (2, 1)),
        (16, 1, (12, 3)),
        (16, 2, (12, 1)),
        (16, 0, (15, 1)),
    ],
)
def test_compute_threads_leave_a_core_to_the_rest(
    cores: int, drafters: int, counts: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.cli.local.up_settings.cpu_limit", lambda: float(cores))
    assert StackOptions().thread_counts(drafters) == counts
    assert StackOptions(threads=5).thread_counts(drafters) == (5, 5)


def test_a_drafter_with_another_tokenizer_is_refused_with_both_names() -> None:
    target = VerifierDescription(model="big", tokenizer_digest="a" * 64)
    check_pair(target, SourceDescription(model="small", tokenizer_digest="a" * 64))
    check_pair(target, SourceDescription(model="corpus", tokenizer_digest=""))
    with pytest.raises(CommandFailed, match=r"small \(b{12}\) is not that of big \(a{12}\)"):
        check_pair(target, SourceDescription(model="small", tokenizer_digest="b" * 64))
    with pytest.raises(CommandFailed, match="none"):
        check_pair(VerifierDescription(model="big"), SourceDescription(model="s", tokenizer_digest="b"))


def flags_of(options: StackOptions) -> dict[str, dict[str, str]]:
    """The flags of each service, without starting one."""
    stack = Stack(options)
    try:
        return {role.name: dict(zip(*[iter(role.flags)] * 2, strict=True)) for role in stack._roles}
    finally:
        stack.close()


def test_a_drafter_that_is_served_has_a_verifier_of_its_own() -> None:
    flags = flags_of(
        StackOptions(target="org/name", drafter="org/small", heads=("org/head",), serve_drafter=True)
    )
    first, second = flags["verifier"], flags["verifier-2"]
    assert (second["--model"], second["--model-name"]) == ("org/small", "org/name:drafter")
    assert (first["--heads"], second["--heads"]) == ("org/head", "")
    assert flags["orchestrator"]["--verifier"] == f"{first['--bind']},{second['--bind']}"


def test_the_first_of_several_drafters_is_served() -> None:
    options = StackOptions(target="org/name", drafter="org/small,org/other", serve_drafter=True)
    flags = flags_of(options)
    assert flags["verifier-2"]["--model"] == "org/small"
    assert (
        flags["orchestrator"]["--drafter"] == f"{flags['drafter']['--bind']},{flags['drafter-2']['--bind']}"
    )


def test_the_second_verifier_takes_over_no_address_name_or_memory_of_the_first() -> None:
    own = {
        "bind": "127.0.0.1:50055",
        "advertise": "host:50055",
        "model_name": "big",
        "heads": ["org/head"],
        "gpu_memory_utilization": 0.5,
        "dtype": "float16",
    }
    overrides = ServiceOverrides(by_role={"verifier": own})
    flags = flags_of(
        StackOptions(target="org/name", drafter="org/small", serve_drafter=True, overrides=overrides)
    )
    second = flags["verifier-2"]
    assert flags["verifier"]["--bind"] == "127.0.0.1:50055" != second["--bind"]
    assert second["--advertise"] == second["--bind"]
    assert (second["--model-name"], second["--heads"]) == ("big:drafter", "")
    assert float(second["--gpu-memory-utilization"]) < 0.5
    assert "--dtype" not in second, "the file says it for both verifiers"


def test_the_second_verifier_starts_where_the_head_of_the_first_learns(tmp_path: Path) -> None:
    config = tmp_path / "outrider.toml"
    config.write_text('[verifier]\nsmall_model = "small"\nlearn_every = 9\nlearn_from = ["ann"]\n')
    variables = {
        "OUTRIDER_CONFIG": str(config),
        "OUTRIDER_VERIFIER__HEADS": "org/head",
        "OUTRIDER_VERIFIER__LEARN": "public",
        "OUTRIDER_VERIFIER__LEARN_DIR": str(tmp_path),
    }
    flags = flags_of(StackOptions(target="org/name", drafter="org/small", serve_drafter=True))
    first, second = (
        read_settings(VerifierSettings, [word for pair in flags[name].items() for word in pair], variables)
        for name in ("verifier", "verifier-2")
    )
    assert (first.learn, first.learn_from, first.learn_dir) == ("public", ("ann",), tmp_path)
    assert (second.heads, second.small_model, second.learn_every) == ((), "", 9)
    refuse_unused(second)


@pytest.mark.parametrize("drafter_device", ["", "cpu"])
@pytest.mark.parametrize("drafters", ["org/small", "org/small,org/other"])
def test_all_that_computes_on_a_gpu_fits_into_its_memory(drafters: str, drafter_device: str) -> None:
    overrides = ServiceOverrides(by_role={"drafter": {"device": drafter_device}})
    for served in (False, True):
        flags = flags_of(
            StackOptions(target="org/name", drafter=drafters, serve_drafter=served, overrides=overrides)
        )
        on_gpu = [name for name in flags if "verifier" in name or ("drafter" in name and not drafter_device)]
        shares = [float(flags[name].get("--gpu-memory-utilization", "0.92")) for name in on_gpu]
        assert sum(shares) == pytest.approx(0.92), (served, on_gpu)


def test_no_drafter_cannot_be_served() -> None:
    with pytest.raises(CommandFailed, match="--serve-drafter needs a drafter"):
        StackOptions(target="org/name", drafter="none", serve_drafter=True).models()


def test_a_reserved_port_is_free_only_for_a_child_that_names_it() -> None:
    stack = Stack(StackOptions(target="org/name"))
    try:
        address = stack._reserve()
        port = int(address.rpartition(":")[2])
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        with socket.socket() as child:
            child.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            child.bind(("127.0.0.1", port))
            child.listen()
            with socket.create_connection(("127.0.0.1", port), timeout=100):
                pass
    finally:
        stack.close()


def test_a_worker_is_started_again_after_growing_pauses_until_it_runs_steadily() -> None:
    restarts, now_s = Restarts(None), 100.0
    waits = []
    for _ in range(8):
        wait_s = restarts.ended(now_s)
        assert wait_s is not None
        waits.append(wait_s)
        assert restarts.due_s == now_s + wait_s
        restarts.started(now_s := restarts.due_s)
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert restarts.ended(now_s + STEADY_S) == 0.5


def test_a_verifier_that_ends_after_every_restart_is_given_up() -> None:
    restarts, now_s = Restarts(MOST_RESTARTS), 0.0
    for _ in range(MOST_RESTARTS):
        assert restarts.ended(now_s) is not None
        restarts.started(now_s := restarts.due_s)
    assert restarts.ended(now_s + STEADY_S - 1) is None
    assert restarts.ended(now_s + STEADY_S) == 0.5, "it ran steadily, and its ends count anew"


def test_the_demonstration_names_what_is_not_installed_before_it_reads_anything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("outrider.cli.local.stack.SERVING", ("no_such_library",))
    with pytest.raises(
        CommandFailed, match=r"not installed: no_such_library.*pip install 'outrider\[serve\]'"
    ):
        run_demo("eager")
