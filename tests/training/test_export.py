"""A model's or a head's folder takes the place of an earlier one whole, whenever the process dies."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from training import export

CONFIG, CARD = "config.json", "README.md"


class Died(BaseException):
    """Stands for the process's end at this point."""


def made(folder: Path, what: str, *names: str) -> Path:
    folder.mkdir()
    for name in names:
        (folder / name).write_text(what)
    return folder


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_a_folder_with_a_card_brings_its_own_and_one_without_keeps_the_earlier_card(tmp_path: Path) -> None:
    folder = made(tmp_path / "head", "first", CONFIG, CARD)
    export.publish(made(tmp_path / "second", "second", CONFIG), folder)
    assert contents(folder) == {CONFIG: "second", CARD: "first"}
    export.publish(made(tmp_path / "third", "third", CONFIG, CARD), folder)
    assert contents(folder) == {CONFIG: "third", CARD: "third"}


def test_whenever_the_process_dies_weights_and_card_are_of_one_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The card names the tenants whose outputs the weights have learnt, so that they can be deleted."""
    staged = made(tmp_path / "staged", "second", CONFIG, CARD)
    seen = []
    for step in range(1, 20):
        folder = made(tmp_path / f"head-{step}", "first", CONFIG, CARD)
        died = False
        with monkeypatch.context() as patch:
            die_at(step, patch)
            try:
                export.publish(staged, folder)
            except Died:
                died = True
        left = contents(folder) if folder.exists() else {}
        assert len(set(left.values())) < 2
        seen.append("".join(set(left.values())))
        export.publish(staged, folder)
        assert contents(folder) == {CONFIG: "second", CARD: "second"}
        assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
        if not died:
            break
    assert {"first", "", "second"} == set(seen)


def die_at(step: int, patch: pytest.MonkeyPatch) -> None:
    """Makes the `step`-th change on the disk raise Died."""
    steps = iter(range(1, 100))

    def dying(change: object) -> object:
        def done(*arguments: object, **options: object) -> object:
            if next(steps) == step:
                raise Died
            return change(*arguments, **options)  # type: ignore[operator]

        return done

    for module, name in ((shutil, "rmtree"), (shutil, "copytree"), (shutil, "copy2"), (os, "rename")):
        patch.setattr(module, name, dying(getattr(module, name)))


def test_a_full_disk_behind_a_death_leaves_the_earlier_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = made(tmp_path / "head", "first", CONFIG, CARD)
    staged = made(tmp_path / "staged", "second", CONFIG, CARD)
    folder.rename(tmp_path / ".head.old")  # as a process leaves it that dies between two renames

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copytree", full)
    with pytest.raises(OSError, match="No space left"):
        export.publish(staged, folder)
    assert contents(folder) == {CONFIG: "first", CARD: "first"}
