"""What a run of ids is about, as a vector: the interface, and the default that needs nothing but the target.

The default pools the target's own input embeddings. Pooling is the plain mean: weights by inverse frequency
(SIF, Arora et al., 2017) and centring found renamed copies of a document less often.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from retrieval_service.dense.weights import EmbeddingTable

Vectors = NDArray[np.float32]
DIMENSIONS = 256
"""Most dimensions of a vector; wider tables are projected down."""
_AT_ONCE = 256


class Embedder(Protocol):
    """Turns windows of ids into vectors of which the inner product says how alike they are.

    Attributes:
        name: what a person calls it.
        digest: two embedders with the same digest give the same vectors.
        dimensions: of each vector.
    """

    name: str
    digest: str
    dimensions: int

    def embed(self, windows: Sequence[Sequence[int] | NDArray[np.integer[Any]]]) -> Vectors:
        """float32 [len(windows), dimensions], unit length; zeros where a window says nothing.

        Safe from several threads. Raises EmbeddingsFailed or EmbeddingsUnfit where a server computes it.
        """
        ...


class TableEmbedder:
    """Embeds a window as the mean of its token embeddings, from the target's own table, in microseconds."""

    def __init__(self, table: EmbeddingTable, name: str, dimensions: int = DIMENSIONS) -> None:
        self._table = table
        self._projection = _projection(table.dimensions, dimensions)
        self.dimensions = min(table.dimensions, dimensions)
        self.name = f"embeddings of {name}"
        self.digest = hashlib.sha256(f"mean:{self.dimensions}:{table.digest}".encode()).hexdigest()

    @classmethod
    def read(cls, folder: Path, dimensions: int = DIMENSIONS) -> "TableEmbedder":
        """The embedder of a model in a Hugging Face folder. Raises UnfitWeights."""
        return cls(EmbeddingTable.read(folder), folder.name, dimensions)

    def embed(self, windows: Sequence[Sequence[int] | NDArray[np.integer[Any]]]) -> Vectors:
        """The vector of each window: the mean of its tokens' embeddings, projected."""
        pooled = np.zeros((len(windows), self.dimensions), dtype=np.float32)
        for start in range(0, len(windows), _AT_ONCE):
            batch = windows[start : start + _AT_ONCE]
            lengths = np.array([len(window) for window in batch])
            filled = np.flatnonzero(lengths)
            if not len(filled):
                continue
            # One gather for the batch; `reduceat` sums from each window's start to the next one's.
            ids = np.concatenate([np.asarray(window, dtype=np.int64) for window in batch if len(window)])
            starts = np.concatenate([[0], np.cumsum(lengths[filled])[:-1]])
            sums = np.add.reduceat(self._table.rows(ids), starts, axis=0)
            pooled[start + filled] = sums if self._projection is None else sums @ self._projection
        return unit(pooled)


def unit(vectors: Vectors) -> Vectors:
    """The rows scaled to unit length; a row that is zero or not finite becomes zero."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    sound = np.isfinite(lengths) & (lengths > 0)
    return np.where(sound, vectors / np.where(sound, lengths, 1), 0).astype(np.float32)


def _projection(width: int, dimensions: int) -> Vectors | None:
    """Random projection; keeps inner products up to about 1 / sqrt(dimensions). None if not needed."""
    if width <= dimensions:
        return None
    # The raw generator is the same in every version of numpy; its distributions are not.
    bits = np.random.PCG64(0).random_raw(width * dimensions).reshape(width, dimensions) & np.uint64(1)
    signs: Vectors = (bits.astype(np.float32) * 2 - 1) / np.float32(np.sqrt(dimensions))
    return signs
