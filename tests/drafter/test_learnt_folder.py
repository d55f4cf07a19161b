"""The folder of what a drafter learnt: whose it is, whenever the given weights come."""

import shutil
import threading
from pathlib import Path

import pytest

from drafter_service.learning import service
from drafter_service.settings import DrafterSettings
from outrider.learning.versions import BASE
from outrider.runtime.metrics import Metrics
from outrider.source.followed import SourceProfile
from tests.drafter.support.fake_drafter import FakeDrafter

COMMIT = "c" * 40


@pytest.fixture
def cached(monkeypatch: pytest.MonkeyPatch, tiny_llama: Path, tmp_path: Path) -> Path:
    """The snapshot of org/tiny as it is before a first load: its configuration alone."""
    cache = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    snapshot = cache / "models--org--tiny" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    shutil.copy(tiny_llama / "config.json", snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text(COMMIT)
    return snapshot


def test_a_drafter_that_the_first_start_downloads_is_the_same_at_the_next(
    monkeypatch: pytest.MonkeyPatch, tiny_llama: Path, cached: Path, tmp_path: Path
) -> None:
    loaded: list[str] = []

    def fetch(settings: DrafterSettings) -> FakeDrafter:
        loaded.append(settings.model)
        if settings.model == "org/tiny":
            for file in tiny_llama.iterdir():
                shutil.copy(file, cached)
        return FakeDrafter()

    monkeypatch.setattr(service, "load", fetch)
    learnt = tmp_path / "learnt"
    settings = DrafterSettings(model="org/tiny", learn="tenant:ann", learn_dir=learnt, device="cpu")
    first = service.Learning(settings, Metrics("drafter"))
    first.load()
    assert loaded == ["org/tiny"]
    versions = first._versions
    assert versions is not None
    assert versions.state.current == BASE
    versions.begin()
    shutil.copytree(tiny_llama, versions.name_of(1))
    versions.use(1)
    versions.close()
    again = service.Learning(settings, Metrics("drafter"))
    again.load()
    assert loaded[1:] == [versions.name_of(1)]
    assert again._versions is not None
    again._versions.close()


def test_verifiers_are_told_that_a_drafter_learns_and_from_whom(
    monkeypatch: pytest.MonkeyPatch, tiny_llama: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(service, "load", lambda settings: FakeDrafter())
    settings = DrafterSettings(
        model=str(tiny_llama), learn="tenant:ann", learn_dir=tmp_path / "learnt", device="cpu"
    )
    learning = service.Learning(settings, Metrics("drafter"))
    profile = SourceProfile("drafter", "fake", learns=False)
    worker = learning.worker(learning.load(), profile, lambda outgoing: None)
    thread = threading.Thread(target=worker.run)
    thread.start()
    worker.stop()
    thread.join(60)
    assert (worker.profile.learns, worker.profile.tenant) == (True, "ann")
