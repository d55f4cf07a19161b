"""Passages found by the words that they share with a query: BM25 over an inverted index in memory."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.rag.passages import RagPassage
from speculative.errors import InvalidRequest

_WORD = re.compile(r"\w+")


def words(text: str) -> list[str]:
    """The words of a text in lower case; an underscore is part of a word."""
    return _WORD.findall(text.lower())


def checked_passages(passages: Iterable[RagPassage]) -> tuple[RagPassage, ...]:
    """The passages, of which there is at least one. Raises InvalidRequest where two have the same name."""
    found = tuple(passages)
    if not found:
        raise InvalidRequest("there are no passages; a retriever needs at least one")
    counted = Counter(passage.name for passage in found)
    name, count = counted.most_common(1)[0]
    if count > 1:
        raise InvalidRequest(f"{count} passages have the name {name!r}; names must be unique")
    return found


def ranked(scores: NDArray[np.float64], count: int, least: float = -math.inf) -> list[int]:
    """Indices of up to `count` highest scores above `least`, best first, of equals the lowest index."""
    level = np.partition(scores, -count)[-count] if count < len(scores) else -np.inf
    among = np.flatnonzero((scores >= level) & (scores > least))
    order = np.lexsort((among, -scores[among]))[:count]
    return [int(index) for index in among[order]]


class SparseRetriever:
    """BM25 (Robertson and Zaragoza, 2009) over passages in memory. A `Retriever`; safe from several threads.

    Args:
        passages: what can be found; at least one, with unique names.
        k1: how soon further occurrences of a word count less.
        b: how far long passages are marked down, 0 to 1.
    """

    def __init__(self, passages: Iterable[RagPassage], *, k1: float = 0.9, b: float = 0.4) -> None:
        self._passages = checked_passages(passages)
        self._rows = {passage.name: row for row, passage in enumerate(self._passages)}
        counted = [Counter(words(passage.text)) for passage in self._passages]
        lengths = np.array([counts.total() for counts in counted], dtype=np.float64)
        norms = k1 * (1 - b + b * lengths / max(1.0, lengths.mean()))
        found: dict[str, list[tuple[int, int]]] = {}
        for row, counts in enumerate(counted):
            for word, count in counts.items():
                found.setdefault(word, []).append((row, count))
        self._weights: dict[str, tuple[NDArray[np.int64], NDArray[np.float64]]] = {}
        """Rows in which a word occurs, and what each occurrence is worth there."""
        for word, places in found.items():
            rows = np.array([row for row, _ in places], dtype=np.int64)
            often = np.array([count for _, count in places], dtype=np.float64)
            rarity = math.log(1 + (len(counted) - len(rows) + 0.5) / (len(rows) + 0.5))
            self._weights[word] = (rows, rarity * often * (k1 + 1) / (often + norms[rows]))

    def search(self, queries: Sequence[str], count: int) -> list[list[RagPassage]]:
        """Up to `count` passages that share a word with each query, best first."""
        return [
            [self._passages[row] for row in ranked(self._scored(query), count, least=0.0)]
            for query in queries
        ]

    def scores(self, query: str, passages: Sequence[RagPassage]) -> list[float]:
        """Scores of passages for a query, equal to those of a search."""
        total = 0.0
        by_row = {self._rows[passage.name]: total for passage in passages}
        for word, times in _counted(query):
            rows, weights = self._weights.get(word, _NOWHERE)
            places = np.searchsorted(rows, list(by_row))
            for row, place in zip(by_row, places.tolist(), strict=True):
                if place < len(rows) and rows[place] == row:
                    by_row[row] += times * float(weights[place])
        return [by_row[self._rows[passage.name]] for passage in passages]

    def _scored(self, query: str) -> NDArray[np.float64]:
        scores = np.zeros(len(self._passages))
        for word, times in _counted(query):
            rows, weights = self._weights.get(word, _NOWHERE)
            scores[rows] += times * weights
        return scores


_NOWHERE = (np.zeros(0, dtype=np.int64), np.zeros(0))


def _counted(query: str) -> list[tuple[str, int]]:
    """Words with their counts, always in the same order, so that sums are the same to the bit."""
    return sorted(Counter(words(query)).items())
