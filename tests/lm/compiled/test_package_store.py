"""Packages in the cache are whole or absent."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from outrider.compiling.store import CompileFailed, PackageStore

NAMES = ("one.so", "two.pt2")


def publish(store: PackageStore, key: str) -> Path:
    with store.building() as folder:
        for name in NAMES:
            (folder / name).write_text(f"{key} {name}")
        return store.publish(folder, key, NAMES)


def test_a_package_is_found_once_it_is_published(tmp_path: Path) -> None:
    store = PackageStore(tmp_path / "passes")
    assert store.find("a") is None
    publish(store, "a")
    found = store.find("a")
    assert found is not None
    assert (found / "one.so").read_text() == "a one.so"
    assert store.find("b") is None


def open_to_all(folder: Path) -> str:
    folder.chmod(0o777)
    return "has mode 0777"


def linked(folder: Path) -> str:
    aside = folder.with_name("aside")
    folder.rename(aside)
    folder.symlink_to(aside)
    return "is a symbolic link"


@pytest.mark.parametrize("spoil", [open_to_all, linked])
@pytest.mark.parametrize("name", ["passes", "passes/a"])
def test_a_folder_that_others_could_have_filled_is_refused_and_left_as_it_is(
    tmp_path: Path, name: str, spoil: Callable[[Path], str]
) -> None:
    store = PackageStore(tmp_path / "passes")
    package = publish(store, "a")
    why = f"{tmp_path / name} {spoil(tmp_path / name)}"
    with pytest.raises(CompileFailed, match=why):
        store.find("a")
    assert (package / "one.so").read_text() == "a one.so"
    if name == "passes":
        with pytest.raises(CompileFailed, match=why), store.turn(lambda: True):
            pass
        with pytest.raises(CompileFailed, match=why), store.building():
            pass


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = PackageStore(tmp_path / "passes")
    publish(store, "a")
    owner = os.geteuid()
    monkeypatch.setattr("os.geteuid", lambda: owner + 1)
    with pytest.raises(CompileFailed, match=f"belongs to user {owner}, but .* as user {owner + 1}"):
        store.find("a")


def test_the_lock_neither_follows_a_link_nor_cuts_what_is_there(tmp_path: Path) -> None:
    store = PackageStore(tmp_path)
    (tmp_path / "lock").write_text("kept")
    with store.turn(lambda: True) as free:
        assert free
    assert (tmp_path / "lock").read_text() == "kept"
    (tmp_path / "lock").rename(tmp_path / "else")
    (tmp_path / "lock").symlink_to(tmp_path / "else")
    with pytest.raises(OSError, match="lock"), store.turn(lambda: True):
        pass


@pytest.mark.parametrize("spoil", ["cut", "missing", "no manifest", "another file"])
def test_a_package_that_is_not_whole_is_removed_instead_of_loaded(tmp_path: Path, spoil: str) -> None:
    store = PackageStore(tmp_path)
    folder = publish(store, "a")
    if spoil == "cut":
        os.truncate(folder / "two.pt2", 3)
    elif spoil == "missing":
        (folder / "one.so").unlink()
    elif spoil == "no manifest":
        (folder / "manifest.json").write_text("{")
    else:
        (folder / "three").write_text("")
    assert store.find("a") is None
    assert not folder.exists()


def test_a_folder_that_was_not_published_leaves_nothing(tmp_path: Path) -> None:
    store = PackageStore(tmp_path)
    with store.building() as folder:
        (folder / "one.so").write_text("half")
    assert list(tmp_path.iterdir()) == []


def test_the_cache_keeps_the_packages_used_last(tmp_path: Path) -> None:
    store = PackageStore(tmp_path)
    for number in range(20):
        os.utime(publish(store, str(number)), (number, number))
    assert store.find("19") is not None
    assert store.find("0") is None
    assert len(list(tmp_path.iterdir())) <= 17


def test_one_process_compiles_at_a_time_and_the_next_removes_what_it_left(tmp_path: Path) -> None:
    first, second = PackageStore(tmp_path), PackageStore(tmp_path)
    with first.turn(lambda: False) as free:
        assert free
        (tmp_path / "building-left").mkdir()
        with second.turn(lambda: True) as other:
            assert not other
    with second.turn(lambda: True) as free:
        assert free
        assert not (tmp_path / "building-left").exists()
