"""The table of input embeddings, read without torch, is the table that torch reads."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from retrieval_service.dense.embeddings import TableEmbedder, unit
from retrieval_service.dense.errors import UnfitWeights
from retrieval_service.dense.weights import EmbeddingTable
from retrieval_service.loading import load
from retrieval_service.settings import RetrievalSettings

# torch and FAISS are never loaded in one process.
SAVE = """
import sys, numpy, torch
from transformers import AutoModelForCausalLM, LlamaConfig, Mamba2Config
folder, family, dtype, shard = sys.argv[1:]
torch.manual_seed(0)
if family == "mamba2":
    config = Mamba2Config(vocab_size=90, hidden_size=16, num_hidden_layers=1, num_heads=4, head_dim=8,
                          n_groups=1, state_size=8)
else:
    config = LlamaConfig(vocab_size=90, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                         num_attention_heads=2, num_key_value_heads=2)
model = AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype))
model.save_pretrained(folder, max_shard_size=shard)
numpy.save(folder + "/expected.npy", model.get_input_embeddings().weight.detach().float().numpy())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dtype", "shard"),
    [
        ("llama", "bfloat16", "1GB"),
        ("llama", "float32", "4KB"),
        ("llama", "float16", "1GB"),
        ("mamba2", "float32", "1GB"),
    ],
)
def test_the_table_is_what_torch_saved(tmp_path: Path, family: str, dtype: str, shard: str) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SAVE, str(tmp_path), family, dtype, shard]
    subprocess.run(command, check=True, env=environment)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard == "4KB")
    table = EmbeddingTable.read(tmp_path)
    assert np.array_equal(table.rows(range(90)), np.load(tmp_path / "expected.npy"))


def bfloat16(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def write_bfloat16(folder: Path, values: np.ndarray, name: str = "transformer.wte.weight") -> None:
    stored = bfloat16(values).tobytes()
    entry = {"dtype": "BF16", "shape": list(values.shape), "data_offsets": [0, len(stored)]}
    header = json.dumps({"__metadata__": {"format": "pt"}, name: entry}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + stored)


def test_bfloat16_is_the_upper_half_of_a_float32(tmp_path: Path) -> None:
    values = np.array([[1.0, -2.5], [3.140625, 0.0], [1e30, -1e-30]], dtype=np.float32)
    write_bfloat16(tmp_path, values)
    rows = EmbeddingTable.read(tmp_path).rows([2, 0])
    assert np.allclose(rows, values[[2, 0]], rtol=2**-7)
    assert rows.dtype == np.float32


def test_a_large_table_stays_mapped_and_says_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_bfloat16(tmp_path, np.random.default_rng(0).standard_normal((50, 8)))
    held = EmbeddingTable.read(tmp_path)
    monkeypatch.setattr("retrieval_service.dense.weights._HELD_BYTES", 0)
    mapped = EmbeddingTable.read(tmp_path)
    assert np.array_equal(held.rows([1, 49, 7]), mapped.rows([1, 49, 7]))
    assert held.digest == mapped.digest


def test_an_unknown_id_is_nothing(table_folder: Path) -> None:
    rows = EmbeddingTable.read(table_folder).rows([5, -1, 10**6])
    assert rows[0].any()
    assert not rows[1:].any()


def test_the_digest_tells_tables_apart(tmp_path: Path, table_folder: Path) -> None:
    (tmp_path / "other").mkdir()
    save_file({"wte.weight": np.ones((200, 24), dtype=np.float32)}, tmp_path / "other" / "model.safetensors")
    digests = {
        EmbeddingTable.read(folder).digest for folder in (tmp_path / "other", table_folder, table_folder)
    }
    assert len(digests) == 2


def test_of_several_tables_the_language_models_is_taken(tmp_path: Path) -> None:
    text, sight = np.ones((4, 3), dtype=np.float32), np.zeros((9, 3), dtype=np.float32)
    tensors = {"vision_tower.text_model.embed_tokens.weight": sight, "model.embed_tokens.weight": text}
    save_file(tensors, tmp_path / "model.safetensors")
    assert EmbeddingTable.read(tmp_path).size == 4


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "no safetensors"),
        (b"", "is no safetensors file"),
        (b"\xff" * 64, "is no safetensors file"),
        (struct.pack("<Q", 4) + b"{{{{", "cannot be read"),
        (struct.pack("<Q", 2) + b"{}", "no tensor's name"),
    ],
)
def test_what_is_no_model_is_refused(tmp_path: Path, content: bytes | None, why: str) -> None:
    if content is not None:
        (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(UnfitWeights, match=why):
        EmbeddingTable.read(tmp_path)


def test_a_table_cut_short_is_refused(tmp_path: Path) -> None:
    write_bfloat16(tmp_path, np.ones((20, 4)))
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UnfitWeights, match="is not all there"):
        EmbeddingTable.read(tmp_path)


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    save_file({"model.embed_tokens.weight": np.ones((4, 4), dtype=np.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(UnfitWeights, match="is I8 of shape"):
        EmbeddingTable.read(tmp_path)


def test_a_window_is_the_mean_of_its_ids_at_unit_length(embedder: TableEmbedder) -> None:
    windows = [[1, 2, 3], [], [7], *([n, n + 1] for n in range(100))]
    vectors = embedder.embed(windows * 3)
    for vector, window in zip(vectors, windows * 3, strict=True):
        expected = embedder._table.rows(window).sum(axis=0, keepdims=True)
        assert np.allclose(vector, unit(expected)[0], atol=1e-6)
    assert not vectors[1].any()


def test_a_wide_table_is_projected_and_keeps_who_is_near(tmp_path: Path) -> None:
    values = np.random.default_rng(1).standard_normal((300, 512)).astype(np.float32)
    save_file({"wte.weight": values}, tmp_path / "model.safetensors")
    narrow, wide = TableEmbedder.read(tmp_path, 128), TableEmbedder.read(tmp_path, 512)
    assert narrow.dimensions == 128
    assert narrow.digest != wide.digest
    windows = [[n, n + 1, n + 2, n + 3] for n in range(100)]
    first, second = narrow.embed(windows), wide.embed(windows)
    assert np.abs(first @ first.T - second @ second.T).max() < 0.5
    # Overlapping by three ids of four is nearer than anything else.
    assert all(int(np.argsort(-(first @ first[n]))[1]) in (n - 1, n + 1) for n in range(1, 99))


def test_a_worker_goes_on_without_documents_beside_a_target_whose_table_is_unknown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_file({"mixer.table": np.ones((4, 4), dtype=np.float32)}, tmp_path / "model.safetensors")
    loaded = load(RetrievalSettings(embeddings=str(tmp_path)))
    assert loaded.documents is None
    assert "the worker has no documents" in caplog.text
    assert "no tensor's name ends with one of embed_tokens.weight" in caplog.text
