"""A model is identified by the digest of its files."""

import json
import shutil
from pathlib import Path

import pytest

from outrider.lm.load.weights_digest import weights_digest


@pytest.fixture
def copy(tiny_llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_llama, tmp_path / "elsewhere"))


def test_a_copy_is_the_same_model_and_other_weights_are_another(
    tiny_llama: Path, tiny_llama_b: Path, copy: Path
) -> None:
    ours = weights_digest(str(tiny_llama))
    assert len(ours) == 32
    assert weights_digest(str(copy)) == ours
    assert weights_digest(str(tiny_llama_b)) != ours


def test_what_is_computed_counts_and_who_wrote_it_down_does_not(copy: Path) -> None:
    ours = weights_digest(str(copy))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(
        json.dumps(config | {"transformers_version": "0.0.1", "dtype": "float16"})
    )
    assert weights_digest(str(copy)) == ours
    (copy / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    assert weights_digest(str(copy)) != ours


def test_a_change_anywhere_in_a_small_file_is_seen(copy: Path) -> None:
    ours = weights_digest(str(copy))
    file = next(copy.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert weights_digest(str(copy)) != ours


def test_weights_of_a_head_in_a_file_of_pickles_count_and_those_of_an_optimiser_do_not(copy: Path) -> None:
    next(copy.glob("*.safetensors")).unlink()
    (copy / "optimizer.pt").write_bytes(b"one")
    assert weights_digest(str(copy)) == ""
    (copy / "medusa_lm_head.pt").write_bytes(b"one")
    ours = weights_digest(str(copy))
    assert ours
    (copy / "optimizer.pt").write_bytes(b"other")
    assert weights_digest(str(copy)) == ours
    (copy / "medusa_lm_head.pt").write_bytes(b"other")
    assert weights_digest(str(copy)) not in ("", ours)


def test_a_revision_of_a_cached_id_is_the_model_that_lies_there(
    tiny_llama: Path, tiny_llama_b: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--org--tiny"
    (repository / "refs").mkdir(parents=True)
    for ref, folder in (("main", tiny_llama), ("better", tiny_llama_b)):
        commit = ref[0] * 40
        shutil.copytree(folder, repository / "snapshots" / commit)
        (repository / "refs" / ref).write_text(commit)
    for name, folder in (
        ("org/tiny", tiny_llama),
        ("org/tiny@better", tiny_llama_b),
        (f"org/tiny@{'b' * 40}", tiny_llama_b),
    ):
        assert weights_digest(name) == weights_digest(str(folder)), name


@pytest.mark.parametrize("broken", ["missing", "no object", "no JSON", "no weights"])
def test_without_files_that_say_so_nothing_is_known(copy: Path, broken: str) -> None:
    match broken:
        case "missing":
            (copy / "config.json").unlink()
        case "no object":
            (copy / "config.json").write_text("[]")
        case "no JSON":
            (copy / "config.json").write_text("{")
        case "no weights":
            next(copy.glob("*.safetensors")).unlink()
    assert weights_digest(str(copy)) == ""


@pytest.mark.parametrize(
    "name", ["", "nobody/has-this-model", "nobody/has-this@main", "a/b@", "not an id at all///"]
)
def test_what_is_nowhere_has_none(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert weights_digest(name) == ""
