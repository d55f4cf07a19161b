"""Nearest contexts: what followed the places of the references that read most like a session's last ids.

For where no exact match is to be had. A context is a fading sum of its last few token embeddings; all places
are compared at once. What it gained was about one per cent (docs/dense.md), so it is off unless asked for.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieval_service.dense.embeddings import TableEmbedder, Vectors, unit
from retrieval_service.dense.matching import BETWEEN, ReferenceText
from retrieval_service.trie import CountedTrie

WIDTH = 8
"""Ids of a context."""
_FADING = 0.8
"""What the weight of an id is multiplied with for each id nearer the end."""
_NEAREST = 3
_WEIGHT = 4
"""What a nearest place counts, an exactly matched one counting 1."""
PLACES = 4096
"""So many places, the references' first ones, are compared; more would take too long for a round."""


class NearestContexts:
    """The contexts of a reference text. Never changes; safe from several threads."""

    __slots__ = ("_embedder", "_places", "_text", "_vectors")

    def __init__(self, text: ReferenceText, embedder: TableEmbedder) -> None:
        self._text = text
        self._embedder = embedder
        ids = text.ids[: PLACES + WIDTH]
        tokens = embedder.token_vectors(ids)
        summed = tokens.copy()
        for back in range(1, min(WIDTH, len(ids))):
            summed[back:] += _FADING**back * tokens[:-back]
        inside = np.flatnonzero((ids[:-1] != BETWEEN) & (ids[1:] != BETWEEN))
        self._places = inside[:PLACES]
        self._vectors: Vectors = unit(summed[self._places])

    def lookup(self, ids: Sequence[int], *, node_limit: int, depth: int) -> CountedTrie | None:
        """What followed the nearest places, counted several times, and the places of the longest match.

        With nothing matched the match length is 1, the weakest claim there is.
        """
        matched, length = self._text.match(ids)
        places = np.concatenate([np.repeat(self.nearest(ids), _WEIGHT), matched])
        return self._text.continued(places, max(1, length), node_limit=node_limit, depth=depth)

    def nearest(self, ids: Sequence[int]) -> NDArray[np.integer[Any]]:
        """The places that read most like the end of `ids`, nearest first."""
        if not len(self._places) or not len(ids):
            return self._places[:0]
        tokens = self._embedder.token_vectors(ids[-WIDTH:])
        weights = _FADING ** np.arange(len(tokens) - 1, -1, -1, dtype=np.float32)
        scores = self._vectors @ unit((weights @ tokens).reshape(1, -1).astype(np.float32))[0]
        return self._places[np.argsort(-scores, kind="stable")[:_NEAREST]]
