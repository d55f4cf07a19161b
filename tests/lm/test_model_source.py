"""Models by folder, id and revision, from a cache laid out by hand; no network is asked."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.lm.load.model import load_model, load_tokenizer
from outrider.lm.load.source import ModelSource
from outrider.lm.runner import PackedLM
from speculative.errors import InvalidRequest

FIRST, SECOND = "1" * 40, "2" * 40
FP8_BLOCK = 16
"""Rows, and columns, of weights that share a scale."""


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache, and nothing but it."""
    cache = tmp_path / "hub"
    cache.mkdir()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in ("huggingface_hub.constants.HF_HUB_CACHE", "transformers.utils.hub.constants.HF_HUB_CACHE"):
        monkeypatch.setattr(name, str(cache))
    return cache


def put(cache: Path, name: str, commits: dict[str, Path], refs: dict[str, str]) -> Path:
    """A repository as `hf download` leaves it."""
    repository = cache / f"models--{name.replace('/', '--')}"
    for commit, folder in commits.items():
        shutil.copytree(folder, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    for ref, commit in refs.items():
        (repository / "refs" / ref).write_text(commit)
    return repository


def weight(lm: PackedLM) -> float:
    return float(lm.model.get_input_embeddings().weight[2, 3])


def test_an_id_and_its_revisions_come_from_the_cache(
    offline: Path, tiny_llama: Path, tiny_llama_b: Path
) -> None:
    refs = {"main": FIRST, "better": SECOND}
    put(offline, "org/tiny", {FIRST: tiny_llama, SECOND: tiny_llama_b}, refs)
    first, second = (weight(PackedLM.load(folder, check=False)) for folder in (tiny_llama, tiny_llama_b))

    loaded = {
        name: PackedLM.load(name, check=False)
        for name in ("org/tiny", "org/tiny@main", "org/tiny@better", f"org/tiny@{SECOND}")
    }

    assert [weight(lm) for lm in loaded.values()] == [first, first, second, second]
    assert [lm.name for lm in loaded.values()] == list(loaded)
    assert all(lm.tokenizer_json is not None for lm in loaded.values())
    assert load_tokenizer("org/tiny@better") is not None


@pytest.mark.parametrize(
    ("name", "command"),
    [("org/other", "hf download org/other`"), ("org/tiny@v9", "hf download org/tiny --revision v9`")],
)
def test_what_is_not_in_the_cache_is_named_with_what_to_do(
    offline: Path, tiny_llama: Path, name: str, command: str
) -> None:
    put(offline, "org/tiny", {FIRST: tiny_llama}, {"main": FIRST})
    with pytest.raises(
        InvalidRequest, match=f"'{name}' was not found in the cache .*HF_HUB_OFFLINE"
    ) as raised:
        PackedLM.load(name)
    assert command in str(raised.value)


def test_a_download_that_stopped_half_way_is_named(offline: Path, tiny_llama: Path) -> None:
    repository = put(offline, "org/tiny", {FIRST: tiny_llama}, {"main": FIRST})
    (repository / "snapshots" / FIRST / "model.safetensors").unlink()
    with pytest.raises(InvalidRequest, match=r"'org/tiny' cannot be loaded: .*model\.safetensors"):
        PackedLM.load("org/tiny")


@pytest.fixture
def copy(tiny_llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_llama, tmp_path / "copy"))


def shards(folder: Path, *there: str) -> None:
    """An index of three files, of which some are there."""
    names = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    index = {"weight_map": {f"layer{number}": name for number, name in enumerate(names)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()
    for name in there:
        (folder / name).write_bytes(b"x")


Spoil = Callable[[Path], object]


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda folder: (folder / "model.safetensors").unlink(), "has no weights: none of model.safetensors"),
        (
            lambda folder: shards(folder, "model-00002-of-00003.safetensors"),
            r"2 of 3 files of weights are missing \(model-00001-of-00003.safetensors, model-00003",
        ),
        (
            lambda folder: (folder / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/"),
            "holds pointers in place of weights .*git lfs pull",
        ),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text("{"),
            r"index\.json cannot be read: .*download it again",
        ),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\x08" * 20), "cannot be loaded: "),
        (lambda folder: (folder / "config.json").write_text("{"), "was not found: .*config.json"),
    ],
)
def test_a_folder_that_is_not_whole_is_named_with_what_is_missing(
    copy: Path, spoil: Spoil, says: str
) -> None:
    spoil(copy)
    with pytest.raises(InvalidRequest, match=says) as raised:
        PackedLM.load(copy)
    assert str(copy) in str(raised.value)


def test_an_fp8_checkpoint_is_read_and_computes_in_the_dtype_asked_for(copy: Path) -> None:
    plain = load_file(copy / "model.safetensors")
    stored: dict[str, torch.Tensor] = {}
    for name, weight in plain.items():
        stored[name] = weight
        if name.endswith("proj.weight"):
            rows, columns = weight.shape
            blocks = weight.reshape(rows // FP8_BLOCK, FP8_BLOCK, columns // FP8_BLOCK, FP8_BLOCK)
            scales = blocks.abs().amax(dim=(1, 3)) / 448
            scaled = (blocks / scales[:, None, :, None]).reshape(rows, columns)
            stored[name], stored[f"{name}_scale_inv"] = scaled.to(torch.float8_e4m3fn), scales
    save_file(stored, copy / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((copy / "config.json").read_text())
    quantised = {"quant_method": "fp8", "weight_block_size": [FP8_BLOCK] * 2, "activation_scheme": "dynamic"}
    (copy / "config.json").write_text(json.dumps(config | {"quantization_config": quantised}))
    state = load_model(str(copy), device="cpu", dtype="float32").state_dict()
    for name, weight in plain.items():
        assert state[name].dtype == torch.float32
        # Three bits of mantissa: a sixteenth of a weight, or of the block's smallest step.
        torch.testing.assert_close(state[name], weight, rtol=1 / 16, atol=1e-3)
    PackedLM.load(copy)  # its check compares packed passes with the model's own forward


@pytest.mark.parametrize("method", ["gptq", "bitsandbytes", "awq", "compressed-tensors", "hqq", "torchao"])
def test_weights_whose_library_is_not_here_are_refused_by_method(copy: Path, method: str) -> None:
    config = json.loads((copy / "config.json").read_text())
    quantised = {"quant_method": method, "bits": 4, "group_size": 32, "load_in_8bit": True}
    (copy / "config.json").write_text(json.dumps(config | {"quantization_config": quantised}))
    with pytest.raises(InvalidRequest, match=f"quantised by {method}"):
        PackedLM.load(copy)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("/nowhere/at/all", "there is no model folder '/nowhere/at/all'"),
        ("./nowhere", "there is no model folder"),
        ("a/b/c", "there is no model folder"),
        ("", "there is no model folder"),
        ("org/name@", "names no revision"),
    ],
)
def test_a_name_that_can_be_none_is_refused_at_once(text: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        ModelSource.of(text)


def test_a_folder_may_have_an_at_sign(copy: Path) -> None:
    folder = copy.rename(copy.with_name("copy@home"))
    assert ModelSource.of(str(folder)) == ModelSource(str(folder), str(folder))
