"""The target's tokenizer by folder, file, id and revision; the cache is laid out by hand."""

import shutil
from pathlib import Path

import pytest

from retrieval_service.loading import CannotLoad, read_tokens

COMMIT = "1" * 40


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_llama: Path) -> Path:
    """A cache with one file of one revision, as a download of it leaves it."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--org--tiny"
    for folder in (repository / "snapshots" / COMMIT, repository / "refs"):
        folder.mkdir(parents=True)
    shutil.copy(tiny_llama / "tokenizer.json", repository / "snapshots" / COMMIT)
    (repository / "refs" / "v2").write_text(COMMIT)
    return tmp_path


def test_a_tokenizer_is_found_by_folder_file_and_revision(cache: Path, tiny_llama: Path) -> None:
    names = (str(tiny_llama), str(tiny_llama / "tokenizer.json"), "org/tiny@v2", f"org/tiny@{COMMIT}")
    found = [read_tokens(name) for name in names]
    assert len({table.digest for table in found if table is not None}) == 1
    assert None not in found
    assert read_tokens("") is None


@pytest.mark.parametrize("name", ["org/tiny", "org/tiny@v3", "org/other"])
def test_what_the_cache_lacks_is_named(cache: Path, name: str) -> None:
    with pytest.raises(CannotLoad, match=f"no tokenizer at '{name}'"):
        read_tokens(name)
