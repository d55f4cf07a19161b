"""A model's table of input embeddings, read from its folder by numpy alone: mapped, not loaded.

The safetensors layout: 64 bits of header length, little-endian; a JSON header that names each tensor's dtype,
shape and byte range; the bytes. bfloat16, which numpy does not have, is the upper half of a float32.
"""

import hashlib
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieval_service.dense.errors import NoEmbeddingTable, UnfitWeights

NAMES = (
    "embed_tokens.weight",
    "wte.weight",
    "word_embeddings.weight",
    "embed_in.weight",
    "tok_embeddings.weight",
    "backbone.embeddings.weight",
)
"""How families call their input embeddings: the last parts of the tensor's name."""

_LONGEST_HEADER = 100_000_000
_STORED: dict[str, np.dtype[Any]] = {"BF16": np.dtype("<u2"), "F16": np.dtype("<f2"), "F32": np.dtype("<f4")}
_SAMPLED_ROWS = 4096
_HELD_BYTES = 64 * 2**20
"""A table no larger than this as float32 is held so; a larger one stays mapped."""


class EmbeddingTable:
    """Input embeddings, a row per token id. `digest` covers the shape, the dtype and a sample of rows."""

    def __init__(self, stored: NDArray[Any], kind: str) -> None:
        self._stored = stored
        self._kind = kind
        self.size, self.dimensions = stored.shape
        stride = max(1, self.size // _SAMPLED_ROWS)
        sample = np.ascontiguousarray(stored[::stride])
        self.digest = hashlib.sha256(f"{kind}{stored.shape}".encode() + sample.tobytes()).hexdigest()
        if stored.size * 4 <= _HELD_BYTES:
            self._stored, self._kind = _widened(stored, kind), "F32"

    @classmethod
    def read(cls, folder: Path) -> "EmbeddingTable":
        """Reads the table of a Hugging Face folder, sharded or not.

        Raises:
            NoEmbeddingTable: no tensor has a known name of input embeddings, or a dtype that numpy reads.
            UnfitWeights: the weights cannot be read.
        """
        path, name = _find(folder)
        header, start = _header(path)
        entry = header.get(name)
        if not isinstance(entry, dict):
            raise UnfitWeights(
                f"{path}: has no tensor {name}, though its index says so; copy the model again"
            )
        kind, shape = entry.get("dtype"), entry.get("shape")
        dtype = _STORED.get(str(kind))
        if dtype is None or not isinstance(shape, list) or len(shape) != 2:
            why = f"{name} is {kind} of shape {shape}; needed are two dimensions of {', '.join(_STORED)}"
            raise NoEmbeddingTable(f"{path}: {why}")
        low, high = entry["data_offsets"]
        if high - low != shape[0] * shape[1] * dtype.itemsize or start + high > path.stat().st_size:
            raise UnfitWeights(f"{path}: {name} is not all there; copy the model again")
        stored = np.memmap(path, dtype=dtype, mode="r", offset=start + low, shape=(shape[0], shape[1]))
        return cls(stored, str(kind))

    def rows(self, ids: Sequence[int] | NDArray[np.integer[Any]]) -> NDArray[np.float32]:
        """Embeddings of ids: float32 [len(ids), dimensions]; zeros for ids that the table does not have."""
        wanted = np.asarray(ids, dtype=np.int64)
        known = (wanted >= 0) & (wanted < self.size)
        values = _widened(self._stored[np.where(known, wanted, 0)], self._kind)
        if not known.all():
            values[~known] = 0
        return values


def _widened(stored: NDArray[Any], kind: str) -> NDArray[np.float32]:
    """A copy of the rows as float32."""
    if kind == "BF16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32)


def _find(folder: Path) -> tuple[Path, str]:
    """The file that holds the table, and the tensor's name."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            files: dict[str, str] = json.loads(index.read_text())["weight_map"]
        except (ValueError, KeyError, OSError) as error:
            raise UnfitWeights(f"{index}: not an index of safetensors files: {error!r}") from error
    else:
        whole = folder / "model.safetensors"
        if not whole.exists():
            raise UnfitWeights(f"{folder}: holds no safetensors; name a model folder saved in that format")
        files = dict.fromkeys(_header(whole)[0], whole.name)
    found = [name for name in files if name.endswith(NAMES)]
    # A model of several parts (vision, text) has its language part's table under the shortest name.
    found.sort(key=lambda name: (len(name), name))
    if not found:
        raise NoEmbeddingTable(f"{folder}: no tensor's name ends with one of {', '.join(NAMES)}")
    return folder / files[found[0]], found[0]


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """A safetensors file's header, and the offset of the first tensor's bytes."""
    try:
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _LONGEST_HEADER + 1
            if length > _LONGEST_HEADER:
                raise UnfitWeights(f"{path}: is no safetensors file")
            header = json.loads(file.read(length))
    except (OSError, ValueError) as error:
        raise UnfitWeights(f"{path}: cannot be read as safetensors: {error}") from error
    if not isinstance(header, dict):
        raise UnfitWeights(f"{path}: is no safetensors file")
    return header, 8 + length
