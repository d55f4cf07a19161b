"""Snapshots and logs: torn, damaged, of another version, and gone for good."""

import itertools
import struct
import zlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest

from retrieval_service.past import disk
from retrieval_service.past.records import PastError
from retrieval_service.past.replay import Replayed
from retrieval_service.past.tenant_files import TenantFiles, finish_wiping, folder_name
from retrieval_service.past.text import Added, PastText

State = list[tuple[int, str, list[int]]]


def quiet(_: str) -> None:
    pass


def files_of(root: Path, said: list[str] | None = None, tenant: str = "one") -> TenantFiles:
    return TenantFiles(root, tenant, quiet if said is None else said.append)


def state(replayed: Replayed) -> State:
    return [(serial, session, list(ids)) for serial, session, ids in replayed.listed()]


def state_of(text: PastText) -> State:
    return [(serial, session, list(ids)) for serial, session, ids in text.sequences()]


def reopened(root: Path, said: list[str] | None = None) -> State:
    return state(files_of(root, said).open(10_000))


def added(text: PastText, pieces: Iterable[tuple[str, Sequence[int]]]) -> list[Added]:
    found = [text.extend(session, ids) for session, ids in pieces]
    return [one for one in found if one is not None]


def small(root: Path) -> tuple[PastText, TenantFiles]:
    """A tenant with a snapshot of one growing session and an empty log."""
    text = PastText(10_000)
    text.extend("a", [1, 2, 3])
    files = files_of(root)
    files.snapshot(text.sequences(), text.next_serial)
    return text, files


PIECES: list[tuple[str, list[int]]] = [
    ("a", [4, 5]),
    ("b", [6]),
    ("a", [7]),
    ("ü", [2**31 - 1, 0]),
    ("b", [8, 9]),
]


def newest(root: Path, kind: str) -> Path:
    return max((root / folder_name("one")).glob(f"*.{kind}"))


def test_a_log_torn_at_any_byte_gives_what_was_written_before_it(tmp_path: Path) -> None:
    text, files = small(tmp_path)
    states, ends = [state_of(text)], [files.log_bytes]
    for piece in PIECES:
        files.append(added(text, [piece]))
        states.append(state_of(text))
        ends.append(files.log_bytes)
    log = newest(tmp_path, "log")
    data = log.read_bytes()
    assert len(data) == ends[-1]
    for size in range(ends[0], len(data) + 1):
        for tail in (b"", bytes(40), b"\xff" * 40):
            found = data[:size] + tail
            log.write_bytes(found)
            said: list[str] = []
            # Zeros behind a record that lacks only zeros are its end.
            whole = sum(found[:end] == data[:end] for end in ends) - 1
            assert reopened(tmp_path, said) == states[whole]
            torn = len(found) > ends[whole]
            assert ["torn" in line for line in said] == [True] * torn
            assert log.stat().st_size == ends[whole]
            # What was cut is gone, and the log goes on.
            assert reopened(tmp_path) == states[whole]


def test_a_bit_flipped_anywhere_gives_some_earlier_state_and_is_said(tmp_path: Path) -> None:
    text, files = small(tmp_path)
    states = [[], state_of(text)]
    for piece in PIECES:
        files.append(added(text, [piece]))
        states.append(state_of(text))
    kept = {path: path.read_bytes() for path in (tmp_path / folder_name("one")).iterdir()}
    assert len(kept) == 2
    for path, data in kept.items():
        for at in range(0, len(data), 3):
            for other in (tmp_path / folder_name("one")).iterdir():
                other.unlink()
            for name, content in kept.items():
                name.write_bytes(content)
            path.write_bytes(data[:at] + bytes((data[at] ^ 1 << at % 8,)) + data[at + 1 :])
            said: list[str] = []
            found = reopened(tmp_path, said)
            assert found in states
            assert found != states[-1] or path.suffix == ".snapshot"
            assert len(said) == 1
            assert path.name in said[0]
            assert reopened(tmp_path) == found


def test_a_log_goes_on_behind_what_was_torn(tmp_path: Path) -> None:
    text, files = small(tmp_path)
    files.append(added(text, PIECES[:2]))
    before = state_of(text)
    with newest(tmp_path, "log").open("ab") as log:
        log.write(b"half a rec")
    files = files_of(tmp_path)
    assert state(files.open(10_000)) == before
    files.append(added(text, PIECES[2:]))
    assert reopened(tmp_path) == state_of(text)


def test_records_that_a_snapshot_holds_already_are_not_added_twice(tmp_path: Path) -> None:
    text, files = small(tmp_path)
    records = added(text, PIECES)
    # Taken while they waited to be written.
    files.snapshot(text.sequences(), text.next_serial)
    files.append(records)
    files.append(added(text, [("a", [5])]))
    assert reopened(tmp_path) == state_of(text)


def test_records_of_what_a_snapshot_had_given_up_are_passed_over(tmp_path: Path) -> None:
    text, files = small(tmp_path)
    records = added(text, PIECES)
    text.give_up_oldest()
    files.snapshot(text.sequences(), text.next_serial)
    files.append(records)
    files.append(added(text, [("a", [5]), ("b", [5])]))
    assert reopened(tmp_path) == state_of(text)


def test_the_next_serial_outlives_what_it_was_given_to(tmp_path: Path) -> None:
    text, files = small(tmp_path)
    text.forget("a")
    files.snapshot(text.sequences(), text.next_serial)
    assert files_of(tmp_path).open(10_000).next_serial == text.next_serial == 1


def test_a_generation_counts_only_once_it_is_whole(tmp_path: Path) -> None:
    text, files = small(tmp_path)
    files.append(added(text, PIECES))
    folder = tmp_path / folder_name("one")
    for half in ("0000000002.snapshot.part", "0000000002.log", "0000000002.log.part", "forget.part"):
        (folder / half).write_bytes(newest(tmp_path, "log").read_bytes()[:50])
        assert reopened(tmp_path) == state_of(text)
        assert sorted(path.name for path in folder.iterdir()) == ["0000000001.log", "0000000001.snapshot"]


def test_an_older_generation_left_behind_is_removed(tmp_path: Path) -> None:
    text, files = small(tmp_path)
    folder = tmp_path / folder_name("one")
    old = {path: path.read_bytes() for path in folder.iterdir()}
    text.extend("b", [4, 4, 4])
    files.snapshot(text.sequences(), text.next_serial)
    assert not any(path.exists() for path in old)
    for path, data in old.items():
        path.write_bytes(data)
    assert reopened(tmp_path) == state_of(text)
    assert not any(path.exists() for path in old)


def test_another_version_is_refused_by_name_and_left_as_it_is(tmp_path: Path) -> None:
    small(tmp_path)
    snapshot = newest(tmp_path, "snapshot")
    data = bytearray(snapshot.read_bytes())
    version, length = struct.unpack_from("<HH", data, 8)
    struct.pack_into("<H", data, 8, version + 1)
    struct.pack_into("<I", data, length - 4, zlib.crc32(data[: length - 4]))
    snapshot.write_bytes(data)
    with pytest.raises(
        PastError, match=rf"{snapshot.name} is of version {version + 1}.*reads version {version}"
    ):
        files_of(tmp_path).open(10_000)
    assert snapshot.read_bytes() == data


def test_another_tenants_files_are_never_read_as_ones_own(tmp_path: Path) -> None:
    small(tmp_path)
    (tmp_path / folder_name("one")).rename(tmp_path / folder_name("two"))
    with pytest.raises(PastError, match=r"of tenant 'one'.*'two'"):
        files_of(tmp_path, tenant="two").open(10_000)


SECRET = [70_001, 70_002, 70_003]


def holds(folder: Path, ids: Sequence[int]) -> list[str]:
    """Files with the ids in any plain encoding of integers."""
    patterns = [struct.pack(f"{order}{len(ids)}{kind}", *ids) for order in "<>" for kind in "IQ"]
    patterns.append(struct.pack(f"<{len(ids)}H", *(token & 0xFFFF for token in ids)))
    patterns.append(" ".join(map(str, ids)).encode())
    files = (path for path in folder.rglob("*") if path.is_file())
    return [path.name for path in files if any(one in path.read_bytes() for one in patterns)]


def with_a_secret(root: Path) -> tuple[PastText, TenantFiles]:
    text, files = small(root)
    files.append(added(text, [("s", SECRET)]))
    files.snapshot(text.sequences(), text.next_serial)
    files.append(added(text, [("s", SECRET), *PIECES]))
    assert len(holds(root, SECRET)) == 2
    return text, files


def test_what_is_forgotten_is_in_no_file(tmp_path: Path) -> None:
    text, files = with_a_secret(tmp_path)
    text.forget("s")
    assert files.forget(["s"], text.sequences(), text.next_serial)
    assert not holds(tmp_path, SECRET)
    assert reopened(tmp_path) == state_of(text)
    files.append(added(text, PIECES))
    assert reopened(tmp_path) == state_of(text)


class Died(Exception):
    """Stands for the process's end at this point."""


def die_at(step: int, patch: pytest.MonkeyPatch) -> None:
    """Makes the `step`-th operation on the disk raise Died."""
    steps = itertools.count(1)

    def dying(real: Callable[..., object]) -> Callable[..., object]:
        def done(*arguments: object) -> object:
            if next(steps) == step:
                raise Died
            return real(*arguments)

        return done

    for name in ("write_new", "sync_folder", "shred"):
        patch.setattr(disk, name, dying(getattr(disk, name)))


def test_forgetting_that_dies_anywhere_either_has_not_begun_or_is_finished_at_the_next_opening(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes = []
    for step in range(1, 100):
        root = tmp_path / str(step)
        root.mkdir()
        text, files = with_a_secret(root)
        before = state_of(text)
        text.forget("s")
        with monkeypatch.context() as patch:
            die_at(step, patch)
            died = False
            try:
                files.forget(["s"], text.sequences(), text.next_serial)
            except Died:
                died = True
        found = reopened(root)
        assert found in (before, state_of(text))
        outcomes.append("done" if not died else "old" if found == before else "new")
        if outcomes[-1] != "old":
            assert not holds(root, SECRET)
        if outcomes[-1] == "done":
            break
    # It was acknowledged at the end only, and what came before is first the old, then the new state.
    assert outcomes == sorted(outcomes, key=["old", "new", "done"].index)
    assert {"old", "new", "done"} == set(outcomes)


def test_a_wiped_tenant_leaves_no_file_even_where_wiping_was_cut_short(tmp_path: Path) -> None:
    _, files = with_a_secret(tmp_path)
    files.wipe()
    assert not list(tmp_path.iterdir())
    with_a_secret(tmp_path)
    folder = tmp_path / folder_name("one")
    folder.rename(folder.with_name(folder.name + ".forgotten"))
    finish_wiping(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_shredded_file_was_overwritten_before_it_went(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(array("I", SECRET).tobytes() * 100_000)
    (tmp_path / "link").hardlink_to(path)
    disk.shred(path)
    assert not path.exists()
    assert (tmp_path / "link").read_bytes() == bytes(1_200_000)
    disk.shred(path)
