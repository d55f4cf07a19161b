"""Passages found by the vectors of their texts: exact search by inner product, with FAISS."""

import hashlib
import importlib
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.rag.passages import RagPassage
from outrider.rag.sparse import checked_passages, ranked, words
from speculative.errors import InvalidRequest

Embed = Callable[[Sequence[str]], NDArray[np.floating[Any]]]
"""Vectors of texts: [texts, dimensions]."""
_REMEMBERED = 1024
"""Queries whose vectors are kept."""
_SPARE = 16
"""Passages that FAISS lists beyond those asked for; their exact scores decide."""
_CLOSE = 1e-4
"""Scores of FAISS, in float32, err by less than this part of the vectors' lengths."""


def hashed_words(dimensions: int = 256) -> Embed:
    """An embedding that needs no model: each word counts in two dimensions that its hash names."""

    def vector(text: str) -> NDArray[np.float32]:
        found = np.zeros(dimensions, dtype=np.float32)
        for word in words(text):
            hashed = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest())
            for _ in range(2):
                found[hashed % dimensions] += 1.0 if hashed & 1 << 60 else -1.0
                hashed //= dimensions
        return found

    def embed(texts: Sequence[str]) -> NDArray[np.float32]:
        vectors = np.stack([vector(text) for text in texts])
        scaled: NDArray[np.float32] = vectors / np.maximum(
            np.linalg.norm(vectors, axis=1, keepdims=True), 1e-9
        )
        return scaled

    return embed


class DenseRetriever:
    """Exact search by inner product over vectors of passages. A `Retriever`.

    Neither the vector of a query nor its passages depend on the other queries of a search. Each query is
    embedded alone, and once. FAISS, which sums a batch in another order than a single query, only proposes;
    products in float64 decide. Otherwise a near tie could fall differently, and change the answer.

    Args:
        passages: what can be found; at least one, with unique names.
        embed: the vectors of passages and queries.
    """

    def __init__(self, passages: Iterable[RagPassage], embed: Embed) -> None:
        try:
            faiss: Any = importlib.import_module("faiss")
        except ImportError as error:
            raise InvalidRequest(
                "DenseRetriever needs FAISS: install outrider[retrieval], or use SparseRetriever"
            ) from error
        self._passages = checked_passages(passages)
        vectors = np.ascontiguousarray(embed([passage.text for passage in self._passages]), dtype=np.float32)
        if vectors.ndim != 2 or len(vectors) != len(self._passages) or not np.isfinite(vectors).all():
            raise InvalidRequest(
                f"embed gave an array of shape {vectors.shape} for {len(self._passages)} texts; "
                "it must be finite numbers [texts, dimensions]"
            )
        self._vectors = vectors.astype(np.float64)
        self._longest = float(np.linalg.norm(self._vectors, axis=1).max())
        self._rows = {passage.name: row for row, passage in enumerate(self._passages)}
        self._index = faiss.IndexFlatIP(vectors.shape[1])
        self._index.add(vectors)

        @lru_cache(_REMEMBERED)
        def vector_of(query: str) -> NDArray[np.float32]:
            return np.asarray(embed([query])[0], dtype=np.float32)

        self._vector_of = vector_of

    def search(self, queries: Sequence[str], count: int) -> list[list[RagPassage]]:
        """The `count` passages of greatest inner product with each query, best first."""
        vectors = np.stack([self._vector_of(query) for query in queries])
        listed = min(count + _SPARE, len(self._passages))
        near, rows = self._index.search(vectors, listed)
        return [
            [self._passages[row] for row in self._best(vector, scores, proposed, count)]
            for vector, scores, proposed in zip(vectors, near, rows, strict=True)
        ]

    def scores(self, query: str, passages: Sequence[RagPassage]) -> list[float]:
        """The exact inner products."""
        vector = self._vector_of(query)
        rows = np.array([self._rows[passage.name] for passage in passages], dtype=np.int64)
        return [float(score) for score in self._products(vector, rows)]

    def _best(
        self, vector: NDArray[np.float32], near: NDArray[np.float32], rows: NDArray[np.int64], count: int
    ) -> list[int]:
        """Rows of the best exact products; all rows are looked at where rounding may have hidden one."""
        rows = np.sort(rows)
        exact = self._products(vector, rows)
        last = np.sort(exact)[-min(count, len(exact))]
        error = _CLOSE * self._longest * float(np.linalg.norm(vector))
        if len(rows) < len(self._passages) and float(near.min()) + error >= last:
            rows = np.arange(len(self._passages))
            exact = self._products(vector, rows)
        return [int(rows[place]) for place in ranked(exact, count)]

    def _products(self, vector: NDArray[np.float32], rows: NDArray[np.int64]) -> NDArray[np.float64]:
        # Row by row in one order: a matrix product would round by how many rows there are.
        products: NDArray[np.float64] = (self._vectors[rows] * vector.astype(np.float64)).sum(axis=1)
        return products
