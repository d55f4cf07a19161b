"""A hub on this machine with a tiny model in several files, and an empty cache."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.shared.local_hub import LocalHub

WEIGHTS = {f"model-0000{number}-of-00002.safetensors": bytes([number]) * 60_000 for number in (1, 2)}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder as a repository has it: what a service loads, and what no service needs."""
    folder = tmp_path / "model"
    (folder / "onnx").mkdir(parents=True)
    for name, content in WEIGHTS.items():
        (folder / name).write_bytes(content)
    index = {"weight_map": {f"layer{number}": name for number, name in enumerate(WEIGHTS)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_text(json.dumps({"model": "x" * 9_000}))
    for other in ("README.md", "pytorch_model.bin", "onnx/model.onnx", "consolidated.safetensors"):
        (folder / other).write_bytes(b"no service needs this")
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache; the hub's library is online, without a token, and gives up early."""
    folder = tmp_path / "cache"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder))
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", 0.1)
    monkeypatch.setattr("outrider.hub.transfer.PAUSE_S", 0.01)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return folder


def point_at(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a hub the one that the library asks, as HF_ENDPOINT does before the library is imported."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)


@pytest.fixture
def hub(model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    with LocalHub({"org/tiny": model}) as hub:
        point_at(hub, monkeypatch)
        yield hub
