"""Packages in the cache are whole or absent."""

import os
from pathlib import Path

import pytest

from outrider.lm.compiled.store import PackageStore

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
