"""Services as children: started, awaited, stopped, and never left behind."""

import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from outrider.runtime.children import ROOT, ServiceFailed, ServiceProcess, stop_all
from tests.in_time import in_time
from tests.integration.live import until

StartToy = Callable[..., ServiceProcess]
HERE = Path(__file__).parent


def runs(pid: int) -> bool:
    """Whether a process with this pid exists and is no zombie."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def obeys_no_sigterm(pid: int) -> bool:
    """Whether the process ignores SIGTERM by now."""
    (mask,) = re.findall(r"^SigIgn:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(int(mask, 16) >> (signal.SIGTERM - 1) & 1)


def ends_within(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while runs(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not runs(pid)


def test_a_ready_child_has_addresses_and_a_pid(toy: ServiceProcess) -> None:
    assert toy.address.startswith("127.0.0.1:")
    assert toy.metrics.startswith("127.0.0.1:")
    assert runs(toy.pid)
    assert toy.poll() is None


def test_stopping_twice_is_as_good_as_once(start_toy: StartToy) -> None:
    toy = start_toy()
    assert toy.stop(60) == 0
    assert toy.stop(60) == 0


def test_a_child_that_does_not_stop_is_killed(start_toy: StartToy) -> None:
    child = start_toy(module="stubborn", wait=False)
    until(lambda: obeys_no_sigterm(child.pid))
    assert child.stop(0.2) == -signal.SIGKILL


def test_children_share_the_time_to_stop(start_toy: StartToy) -> None:
    children = [start_toy(module="stubborn", wait=False) for _ in range(3)]
    until(lambda: all(obeys_no_sigterm(child.pid) for child in children))
    started = time.monotonic()
    stop_all(children, 0.5)
    in_time(time.monotonic() - started < 1.4)
    assert not any(runs(child.pid) for child in children)


def test_a_child_that_is_not_ready_in_time_is_an_error(start_toy: StartToy) -> None:
    child = start_toy("--load-s", "60", wait=False)
    with pytest.raises(ServiceFailed, match=r"drafter was not ready within 0\.1 s"):
        child.wait_ready(0.1)


def test_a_child_that_ends_early_is_reported_with_the_end_of_its_log(start_toy: StartToy) -> None:
    with pytest.raises(ServiceFailed, match=r"(?s)exit status 3 without being ready.*last words") as failed:
        start_toy("--silent-end", module="stubborn")
    assert failed.value.code == "UNAVAILABLE"


def test_settings_that_are_wrong_are_the_childs_own_words(start_toy: StartToy) -> None:
    with pytest.raises(ServiceFailed, match="bind = 'nowhere'") as failed:
        start_toy("--bind", "nowhere")
    assert failed.value.code == "INVALID_ARGUMENT"


def test_a_child_is_only_started_from_the_main_thread(start_toy: StartToy) -> None:
    raised: list[BaseException] = []

    def start() -> None:
        try:
            start_toy(wait=False)
        except RuntimeError as error:
            raised.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert "main thread" in str(raised[0])


@pytest.mark.parametrize("flags", [[], ["--block-s", "60", "--load-s", "0"]], ids=["ready", "loading"])
def test_children_die_with_a_parent_that_is_killed(flags: list[str]) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(HERE), str(ROOT)))}
    with subprocess.Popen(
        [sys.executable, str(HERE / "parent.py"), *flags], env=env, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert runs(pid)
        parent.kill()
        parent.wait()
        assert ends_within(pid, 60)


def test_a_parent_that_is_gone_already_ends_the_child_at_once() -> None:
    code = "from outrider.runtime.lifeline import die_with_parent; die_with_parent(1 << 22); print('alive')"
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, cwd=ROOT, timeout=200, check=False
    )
    assert (ended.returncode, ended.stdout) == (1, b"")


def test_an_interrupt_of_the_group_spares_the_children(toy: ServiceProcess) -> None:
    assert os.getpgid(toy.pid) != os.getpgid(0)


@pytest.mark.parametrize("module", ["orchestrator", "verifier_service", "drafter_service"])
@pytest.mark.parametrize("given", [["--parent-pid", "1"], ["--parent-pid=1"]])
def test_a_service_looks_for_its_parent_before_it_imports_what_takes_long(
    module: str, given: list[str]
) -> None:
    command = [sys.executable, "-X", "importtime", "-m", module, *given]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 1
    imported = {line.rpartition("|")[2].strip() for line in ended.stderr.splitlines()}
    assert "outrider.runtime.lifeline" in imported
    assert not imported & {"grpc", "torch", "numpy", "pydantic", "asyncio"}


def test_a_child_that_loads_says_how_far_it_is_and_is_waited_for(start_toy: StartToy) -> None:
    child = start_toy("--tensors", "2", "--load-s", "0.2", wait=False)
    assert not child.ready
    heard = [child.hear(100) for _ in range(2)]
    assert heard == [True, True]
    assert (child.loaded, child.of) == (2, 2)
    assert not child.ready
    child.wait_ready(100)
    assert child.ready


def test_a_child_that_nobody_waits_for_may_announce_more_than_its_pipe_holds(start_toy: StartToy) -> None:
    child = start_toy("--tensors", "5000", wait=False)

    def is_ready() -> bool:
        child.catch_up()
        return child.ready

    until(is_ready)
    assert (child.loaded, child.of) == (5000, 5000)


def test_catching_up_with_a_child_that_can_announce_no_more_does_not_wait_for_its_end() -> None:
    process = subprocess.Popen(["sh", "-c", "exec >&-; exec sleep 600"], stdout=subprocess.PIPE)
    child = ServiceProcess("toy", process, None)
    try:
        assert select.select([process.stdout], [], [], 60)[0], "it has closed its output"
        began = time.monotonic()
        assert child.catch_up() is None
        in_time(time.monotonic() - began < 2)
    finally:
        child.stop(60)


def test_catching_up_with_a_child_that_gave_up_is_no_error(start_toy: StartToy) -> None:
    child = start_toy("--fault", "refused", wait=False)
    until(lambda: child.poll() is not None)
    assert child.catch_up() == child.poll()
    assert not child.ready
