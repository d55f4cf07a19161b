"""Vectors searched by inner product, in the kind of FAISS index that suits how many there are.

Exact where that is fast enough, a graph (HNSW) above, compressed lists (IVF-PQ) where memory counts;
docs/dense.md has the measurements. FAISS runs on one thread, and torch is never imported beside it. Not safe
from several threads: the `ScopeIndex` that owns an index locks.
"""

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from retrieval_service.dense.embeddings import Vectors

# Its stubs do not know what it adds to its classes when it is imported.
faiss: Any = importlib.import_module("faiss")

Kind = Literal["flat", "hnsw", "ivfpq"]

faiss.omp_set_num_threads(1)

_NEIGHBOURS = 16
_WHILE_BUILDING = 80
_WHILE_SEARCHING = 64
_PROBES = 16
_CODE_BYTES = 32
_TRAINED_ON = 40
"""Vectors that each list is trained on; FAISS asks for 39."""
_CENTROIDS = 256
_LEAST_TRAINED = 16
_ROUNDS = 10
"""Rounds of k-means; more gain little."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Most vectors of an index of each kind; a larger index is IVF-PQ."""

    flat: int = 50_000
    hnsw: int = 200_000

    def __post_init__(self) -> None:
        if self.hnsw < _LEAST_TRAINED:
            raise ValueError(
                f"IVF-PQ is trained on {_LEAST_TRAINED} vectors at least, so hnsw is not {self.hnsw}"
            )

    def kind(self, vectors: int) -> Kind:
        """The kind of index for a number of vectors."""
        if vectors <= self.flat:
            return "flat"
        return "hnsw" if vectors <= self.hnsw else "ivfpq"


class VectorIndex:
    """A FAISS index of rows 0, 1, ... in order of adding. Rows are left out of searches, never removed."""

    def __init__(self, index: Any, kind: Kind) -> None:
        self._index = index
        self.kind = kind

    @classmethod
    def build(cls, vectors: NDArray[np.floating[Any]], kind: Kind) -> "VectorIndex":
        """An index of float [rows, dimensions]. IVF-PQ is trained on an even sample of the rows."""
        rows, dimensions = vectors.shape
        if kind == "flat":
            made = faiss.IndexFlatIP(dimensions)
        elif kind == "hnsw":
            made = faiss.IndexHNSWFlat(dimensions, _NEIGHBOURS, faiss.METRIC_INNER_PRODUCT)
            made.hnsw.efConstruction = _WHILE_BUILDING
        else:
            made = _compressed(vectors)
        built = cls(made, kind)
        for start in range(0, rows, 10_000):
            built.add(vectors[start : start + 10_000])
        return built

    @classmethod
    def read(cls, path: Path, kind: Kind) -> "VectorIndex":
        """The index in a file of `write`. Check the checksum first: FAISS trusts what it reads."""
        return cls(faiss.read_index(str(path)), kind)

    def write(self, path: Path) -> None:
        """Writes the whole index to one file. Raises OSError."""
        try:
            faiss.write_index(self._index, str(path))
        except RuntimeError as error:
            raise OSError(f"{path}: the index cannot be written: {error}") from error

    def __len__(self) -> int:
        return int(self._index.ntotal)

    @property
    def dimensions(self) -> int:
        """Dimensions of each vector."""
        return int(self._index.d)

    def add(self, vectors: NDArray[np.floating[Any]]) -> None:
        """Appends rows, float [rows, dimensions]."""
        if len(vectors):
            self._index.add(np.ascontiguousarray(vectors, dtype=np.float32))

    def search(
        self, vector: Vectors, count: int, without: NDArray[np.bool_] | None = None
    ) -> list[tuple[int, float]]:
        """Up to `count` rows and their inner products, best first; never a row where `without` is true."""
        if not len(self) or count <= 0:
            return []
        options: dict[str, Any] = {}
        if without is not None and without.any():
            options["sel"] = faiss.IDSelectorBitmap(np.packbits(~without, bitorder="little"))
        wanted = min(count, len(self))
        parameters = self._parameters(wanted, options)
        scores, rows = self._index.search(vector.reshape(1, -1), wanted, params=parameters)
        return [(int(row), float(score)) for row, score in zip(rows[0], scores[0], strict=True) if row >= 0]

    def _parameters(self, wanted: int, options: dict[str, Any]) -> Any:
        if self.kind == "hnsw":
            return faiss.SearchParametersHNSW(efSearch=max(_WHILE_SEARCHING, wanted), **options)
        if self.kind == "ivfpq":
            return faiss.SearchParametersIVF(nprobe=_PROBES, **options)
        return faiss.SearchParameters(**options) if options else None


def _compressed(vectors: NDArray[np.floating[Any]]) -> Any:
    """A trained, empty IVF-PQ index for a number of vectors."""
    rows, dimensions = vectors.shape
    lists = max(1, min(int(4 * np.sqrt(rows)), rows // _TRAINED_ON))
    parts = next(parts for parts in range(min(_CODE_BYTES, dimensions), 0, -1) if dimensions % parts == 0)
    bits = 8 if rows >= _TRAINED_ON * _CENTROIDS else 4
    quantizer = faiss.IndexFlatIP(dimensions)
    made = faiss.IndexIVFPQ(quantizer, dimensions, lists, parts, bits, faiss.METRIC_INNER_PRODUCT)
    made.own_fields = True
    quantizer.this.disown()
    made.cp.niter = made.pq.cp.niter = _ROUNDS
    made.pq.cp.max_points_per_centroid = _TRAINED_ON
    # Fewer than FAISS likes is no reason to say so on stderr.
    made.cp.min_points_per_centroid = made.pq.cp.min_points_per_centroid = 1
    stride = max(1, rows // (_TRAINED_ON * max(lists, _CENTROIDS)))
    made.train(np.ascontiguousarray(vectors[::stride], dtype=np.float32))
    return made
