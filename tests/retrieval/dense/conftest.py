"""A tiny table of embeddings in a model folder, and an embedder over it."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from retrieval_service.dense.embeddings import TableEmbedder

IDS = 200
WIDTH = 24


@pytest.fixture(scope="session")
def table_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder that holds nothing but a table of 200 ids, 24 wide."""
    folder = tmp_path_factory.mktemp("table")
    table = np.random.default_rng(3).standard_normal((IDS, WIDTH)).astype(np.float32)
    save_file({"model.embed_tokens.weight": table}, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="session")
def embedder(table_folder: Path) -> TableEmbedder:
    """Over that table."""
    return TableEmbedder.read(table_folder)
