"""Past outputs as the service uses them: several tenants, threads, restarts, a full disk."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from outrider.folder_lock import FolderInUse
from retrieval_service.past.outputs import Limits, PastOutputs
from retrieval_service.past.records import PastError
from retrieval_service.past.tenant_files import TenantFiles, folder_name
from retrieval_service.past.writer import DiskPolicy
from retrieval_service.trie import counted
from tests.in_time import in_time

WAIT_S = 20.0
SOON = DiskPolicy(sync_s=0.05, rotate_bytes=2_000)
ROOT = Path(__file__).parents[3]


OPENS = """
import sys
from pathlib import Path
from retrieval_service.past.outputs import PastOutputs
PastOutputs(Path(sys.argv[1]))
"""


def first(outputs: PastOutputs, tenant: str, ids: list[int]) -> tuple[int, ...]:
    found = outputs.memory(tenant).lookup(ids, node_limit=3, depth=3)
    return () if found is None else found.tokens


def test_what_was_added_is_found_at_once_and_after_a_restart(tmp_path: Path) -> None:
    outputs = PastOutputs(tmp_path / "new" / "folder", policy=SOON)
    memory = outputs.memory("one")
    assert memory.lookup([1], node_limit=3, depth=3) is None
    outputs.extend("one", "s", [1, 2])
    outputs.extend("one", "s", [3, 4])
    expected = counted([(2, 3, 4)], 1, 3)
    assert memory.lookup([1], node_limit=3, depth=3) == expected
    outputs.finish("one", "s")
    outputs.close()
    again = PastOutputs(tmp_path / "new" / "folder", policy=SOON)
    assert again.memory("one").lookup([1], node_limit=3, depth=3) == expected
    again.extend("one", "s", [9])
    assert first(again, "one", [4]) == ()
    again.close()


def test_without_a_folder_it_lives_in_memory() -> None:
    outputs = PastOutputs(None)
    outputs.extend("one", "s", [1, 2])
    assert outputs.flush()
    assert first(outputs, "one", [1]) == (2,)
    assert outputs.forget("one", "s") == 2
    assert first(outputs, "one", [1]) == ()
    outputs.close()


def test_no_tenant_finds_another_ones_text_whatever_it_is_called(tmp_path: Path) -> None:
    names = [
        "a",
        "A",
        "a/",
        "../a",
        "..",
        ".",
        "a\0",
        "a\u0301",
        "\u00e1",
        "x" * 1024,
        "lock",
        folder_name("a"),
    ]
    outputs = PastOutputs(tmp_path, policy=SOON)
    for number, name in enumerate(names):
        outputs.extend(name, "s", [7, 8, 100 + number])
    assert outputs.flush()
    for _ in range(2):
        for number, name in enumerate(names):
            assert first(outputs, name, [7, 8]) == (100 + number,)
            for other in range(len(names)):
                assert first(outputs, name, [100 + other]) == ()
        outputs.close()
        outputs = PastOutputs(tmp_path, policy=SOON)
    assert len(list(tmp_path.iterdir())) == len(names) + 1
    # Forgetting one takes nothing from the others, by whatever session name.
    outputs.forget_tenant("a")
    outputs.forget("A", "s")
    found = [bool(first(outputs, name, [7, 8])) for name in names]
    assert found == [name not in ("a", "A") for name in names]
    outputs.close()


def test_a_folder_of_one_tenant_copied_over_anothers_is_refused(tmp_path: Path) -> None:
    outputs = PastOutputs(tmp_path, policy=SOON)
    outputs.extend("one", "s", [1, 2])
    outputs.close()
    (tmp_path / folder_name("one")).rename(tmp_path / folder_name("two"))
    with pytest.raises(PastError, match="tenant 'one'"):
        PastOutputs(tmp_path, policy=SOON)


def test_a_second_process_on_one_folder_is_refused_and_told_who_has_it(tmp_path: Path) -> None:
    outputs = PastOutputs(tmp_path, policy=SOON)
    command = [sys.executable, "-c", OPENS, str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert ended.returncode != 0
    assert "FolderInUse" in ended.stderr
    assert "in use by another process (pid " in ended.stderr
    outputs.extend("one", "s", [1, 2])
    assert outputs.flush()
    outputs.close()
    PastOutputs(tmp_path, policy=SOON).close()


@pytest.mark.parametrize("tenant", ["", "x" * 1025])
def test_names_that_are_none_are_refused(tenant: str) -> None:
    outputs = PastOutputs(None)
    for names in ((tenant, "s"), ("one", tenant)):
        with pytest.raises(ValueError, match="1 to 1024 bytes"):
            outputs.extend(*names, [1])
    assert first(outputs, tenant, [1]) == ()


def test_limits_hold_for_each_tenant_for_all_and_for_their_number() -> None:
    outputs = PastOutputs(None, Limits(tenant_tokens=2_000, total_tokens=5_000, tenants=4))
    for number in range(60):
        for tenant in range(5):
            taken = outputs.extend(f"t{tenant}", f"s{number}", [tenant, number] * 50)
            assert taken == (tenant < 4)
    stats = outputs.stats()
    assert stats.tenants == 4
    assert 4_000 < stats.tokens <= 5_000 + 128
    assert stats.tokens + stats.evicted_tokens == 4 * 60 * 100
    assert stats.refused == 60
    # A tenant that floods gives way itself.
    small = PastOutputs(None, Limits(tenant_tokens=100_000, total_tokens=5_000))
    small.extend("quiet", "s", [1, 2, 3])
    for number in range(200):
        small.extend("loud", f"s{number}", [number] * 100)
    assert first(small, "quiet", [1, 2]) == (3,)
    assert small.stats().tokens <= 5_000 + 128


def test_limits_hold_for_what_an_earlier_run_left(tmp_path: Path) -> None:
    outputs = PastOutputs(tmp_path, policy=SOON)
    for number in range(50):
        outputs.extend("one", f"s{number}", [number, 1, 2] * 40)
    outputs.close()
    again = PastOutputs(tmp_path, Limits(tenant_tokens=600), SOON)
    assert again.stats().tokens == 600
    assert first(again, "one", [49, 1]) == (2, 49, 1)
    assert first(again, "one", [3]) == ()
    again.close()


def test_logs_are_exchanged_for_snapshots_before_they_grow_long(tmp_path: Path) -> None:
    outputs = PastOutputs(tmp_path, Limits(tenant_tokens=1_000), SOON)
    for number in range(200):
        outputs.extend("one", f"s{number}", [number] * 100)
        outputs.flush()
    size = sum(path.stat().st_size for path in tmp_path.rglob("*.*"))
    assert size < 2 * (4 * 1_000 + 2_000) + 2_000
    outputs.close()


def test_forgotten_text_is_neither_found_nor_in_any_file_and_stays_gone(tmp_path: Path) -> None:
    secret = [70_001, 70_002, 70_003]
    pattern = b"".join(token.to_bytes(4, "little") for token in secret)

    def in_files() -> bool:
        return any(pattern in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())

    outputs = PastOutputs(tmp_path, policy=SOON)
    for tenant in ("one", "two", "three"):
        outputs.extend(tenant, "keep", [1, 2, 3])
        outputs.extend(tenant, "secret", secret)
        outputs.finish(tenant, "secret")
        outputs.extend(tenant, "secret", secret)
    outputs.flush()
    assert in_files()
    assert outputs.forget("one", "secret") == 6
    assert outputs.forget("two", "secret") == 6
    assert outputs.forget_tenant("three") == 9
    assert not in_files()
    for tenant in ("one", "two", "three"):
        assert first(outputs, tenant, [70_001]) == ()
    outputs.extend("three", "other", [5, 6])
    outputs.extend("one", "other", [5, 6])
    outputs.close()
    assert not in_files()
    again = PastOutputs(tmp_path, policy=SOON)
    assert first(again, "one", [1]) == (2, 3)
    assert [first(again, name, [5]) for name in ("one", "two", "three")] == [(6,), (), (6,)]
    assert first(again, "three", [1]) == ()
    assert again.forget_tenant("nobody") == again.forget("nobody", "s") == again.forget("one", "nobody") == 0
    again.close()


def test_sessions_are_forgotten_together_in_one_new_generation(tmp_path: Path) -> None:
    outputs = PastOutputs(tmp_path, policy=SOON)
    for session in ("s#0", "s#1", "keep"):
        outputs.extend("one", session, [70_001, 2, 3])
    outputs.flush()
    (before,) = (int(path.stem) for path in tmp_path.rglob("*.snapshot"))
    assert outputs.forget("one", "s#0", "s#1", "s#2") == 6
    (after,) = (int(path.stem) for path in tmp_path.rglob("*.snapshot"))
    assert after == before + 1
    outputs.close()
    again = PastOutputs(tmp_path, policy=SOON)
    assert again.stats().tokens == 3
    again.close()


def test_text_that_was_evicted_is_forgotten_on_the_disk_too(tmp_path: Path) -> None:
    outputs = PastOutputs(tmp_path, Limits(tenant_tokens=200), SOON)
    outputs.extend("one", "secret", [70_001] * 30)
    outputs.extend("one", "keep", [1, 2] * 90)
    assert outputs.flush()
    assert outputs.stats().evicted_tokens == 30
    assert outputs.forget("one", "secret") == 0
    pattern = (70_001).to_bytes(4, "little")
    assert not any(pattern in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    outputs.close()


def test_files_that_cannot_be_read_can_still_be_forgotten(tmp_path: Path) -> None:
    outputs = PastOutputs(tmp_path, policy=SOON)
    outputs.extend("one", "s", [1, 2])
    outputs.close()
    for path in (tmp_path / folder_name("one")).iterdir():
        path.write_bytes(b"?" + path.read_bytes()[1:])
    said: list[str] = []
    again = PastOutputs(tmp_path, policy=SOON, say=said.append)
    assert len(said) == 1
    assert folder_name("one") in said[0]
    again.forget_tenant("one")
    again.close()
    assert not (tmp_path / folder_name("one")).exists()


def test_lookups_beside_feeding_and_forgetting_never_fail_and_find_only_what_was_fed() -> None:
    outputs = PastOutputs(None, Limits(tenant_tokens=3_000))
    stop = threading.Event()
    failures: list[BaseException] = []

    def feed(name: str) -> None:
        try:
            number = 0
            while not stop.is_set():
                outputs.extend("one", f"{name}{number % 5}", list(range(number % 50, number % 50 + 9)))
                number += 1
                if number % 10 == 0:
                    outputs.finish("one", f"{name}{number % 5}")
                if number % 37 == 0:
                    outputs.forget("one", f"{name}{number % 5}")
        except BaseException as error:
            failures.append(error)

    feeders = [threading.Thread(target=feed, args=(name,)) for name in "ab"]
    for feeder in feeders:
        feeder.start()
    hits = lookups = 0
    until = time.monotonic() + 60
    while lookups < 3_000 or (not hits and time.monotonic() < until):
        lookups += 1
        found = outputs.memory("one").lookup([20, 21, 22], node_limit=4, depth=4)
        if found is not None and found.match_length == 3:
            hits += 1
            assert found.tokens[0] in range(60)
    stop.set()
    for feeder in feeders:
        feeder.join()
    assert not failures
    assert hits


FULL_DISK = """
import resource, sys
from pathlib import Path
from retrieval_service.past.outputs import PastOutputs
from retrieval_service.past.writer import DiskPolicy

def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

said = []
outputs = PastOutputs(Path(sys.argv[1]), policy=DiskPolicy(sync_s=0.05), say=said.append)
outputs.extend("one", "s", [1, 2, 3])
outputs.extend("one", "secret", [70001] * 50)
assert outputs.flush() and not said
limit(500)
for number in range(20):
    outputs.extend("one", "s", [100 + number] * 20)
assert not outputs.flush()
assert outputs.memory("one").lookup([119], node_limit=1, depth=1).tokens == (119,)
assert len(said) == 1 and "in memory only" in said[0], said
while outputs.stats().behind != 1:
    pass  # its thread is just trying again
if sys.argv[2] == "forget":
    assert outputs.forget("one", "secret") == 50
    pattern = (70001).to_bytes(4, "little")
    assert not any(pattern in path.read_bytes() for path in Path(sys.argv[1]).rglob("*.*"))
if sys.argv[2] == "dies":
    import os
    os._exit(0)
limit(resource.RLIM_INFINITY)
assert outputs.flush()
assert outputs.stats().behind == 0 and "on the disk again" in said[-1], said
outputs.extend("one", "s", [77])
outputs.close()
"""


@pytest.mark.parametrize("how", ["recovers", "forget", "dies"])
def test_a_full_disk_costs_nothing_but_what_a_restart_meanwhile_would_lose(tmp_path: Path, how: str) -> None:
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path), how]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr
    outputs = PastOutputs(tmp_path, policy=SOON, say=lambda _: None)
    # Before the disk was full, and the last of what came while it was.
    assert first(outputs, "one", [1])[:2] == (2, 3)
    assert first(outputs, "one", [118, 119])[:1] == (() if how == "dies" else (119,))
    assert bool(first(outputs, "one", [70_001])) == (how != "forget")
    outputs.close()


STARTS_ON_A_FULL_DISK = """
import resource, sys
from pathlib import Path
from retrieval_service.past.outputs import PastOutputs

resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
outputs = PastOutputs(Path(sys.argv[1]))
assert outputs.memory("one").lookup([1], node_limit=1, depth=1).tokens == (2,)
assert outputs.forget_tenant("one") == 2
outputs.close()
"""


def test_a_full_disk_is_no_reason_not_to_start(tmp_path: Path) -> None:
    outputs = PastOutputs(tmp_path, policy=SOON)
    outputs.extend("one", "s", [1, 2])
    outputs.close()
    command = [sys.executable, "-c", STARTS_ON_A_FULL_DISK, str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr
    assert not (tmp_path / folder_name("one")).exists()


def test_thousands_of_records_that_wait_at_once_are_all_written_in_order(tmp_path: Path) -> None:
    outputs = PastOutputs(tmp_path, policy=DiskPolicy(sync_s=0.02))
    outputs.extend("one", "s", [0])
    outputs.extend("other", "s", [0])
    assert outputs.flush()
    other = outputs._tenants["other"]
    with other._lock:
        # The writer waits for it, and meanwhile for nothing else.
        other.behind = True
        time.sleep(0.2)
        for number in range(1, 7_000):
            outputs.extend("one", "s", [number])
        in_time(outputs.stats().waiting_records == 6_999)
    outputs.close()
    said: list[str] = []
    again = PastOutputs(tmp_path, say=said.append)
    assert not said
    assert again.stats().tokens == 7_001
    assert first(again, "one", [5_000]) == (5_001, 5_002, 5_003)
    again.close()


def test_where_too_many_records_wait_a_snapshot_makes_up_for_them(tmp_path: Path) -> None:
    outputs = PastOutputs(tmp_path, policy=DiskPolicy(sync_s=0.05, waiting=2))
    for number in range(300):
        outputs.extend("one", "s", [number, 7])
    assert outputs.stats().skipped_records
    assert outputs.flush()
    outputs.close()
    again = PastOutputs(tmp_path, policy=SOON)
    assert again.stats().tokens == 600
    assert first(again, "one", [299]) == (7,)
    again.close()


@pytest.mark.parametrize("step", ["append", "snapshot", "sync"])
def test_a_fault_in_writing_costs_no_more_than_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("on purpose")

    said: list[str] = []
    outputs = PastOutputs(tmp_path, policy=SOON, say=said.append)
    outputs.extend("one", "s", [1, 2])
    assert outputs.flush()
    with monkeypatch.context() as faulty:
        faulty.setattr(TenantFiles, step, fail)
        outputs.extend("one", "s", [3])
        outputs.extend("new", "s", [4, 5])
        outputs.flush(WAIT_S)
    assert outputs.flush(WAIT_S)
    assert "in memory only for now: on purpose" in said[0]
    assert "on the disk again" in said[-1]
    outputs.close()
    again = PastOutputs(tmp_path, policy=SOON)
    assert (first(again, "one", [2]), first(again, "new", [4])) == ((3,), (5,))
    again.close()


def test_a_disk_that_hangs_holds_up_the_end_no_longer_than_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, hangs = threading.Event(), threading.Event()

    def hang(*_: object) -> None:
        reached.set()
        assert hangs.wait(WAIT_S)

    said: list[str] = []
    outputs = PastOutputs(tmp_path, policy=DiskPolicy(sync_s=0.05, waiting=1), say=said.append)
    outputs.extend("one", "s", [1, 2])
    assert outputs.flush()
    monkeypatch.setattr(TenantFiles, "append", hang)
    outputs.extend("one", "s", [3])
    assert reached.wait(WAIT_S)
    outputs.extend("one", "s", [4])
    assert outputs.stats().waiting_records == 1, "as many as may wait"
    outputs.close(timeout=0.1)
    assert said == ["past outputs were not all written within 0.1 s"]
    with pytest.raises(FolderInUse):
        PastOutputs(tmp_path)  # which would write beside the thread
    hangs.set()
    outputs.close()
    PastOutputs(tmp_path).close()


def test_what_idle_tenants_give_up_for_room_leaves_memory_while_others_are_fed() -> None:
    outputs = PastOutputs(None, Limits(total_tokens=5_000))
    outputs.extend("idle", "s", list(range(5_000)))
    for number in range(20):
        outputs.extend("busy", str(number), [number] * 100)
    assert first(outputs, "idle", [7]) == ()
    assert not outputs._tenants["idle"].text.leaving
    assert first(outputs, "busy", [1]) == (1, 1, 1)
    outputs.close()
