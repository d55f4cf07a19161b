"""A drafter without a model: counts of n-grams in texts. It needs no accelerator."""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from drafter_service.ngram_counts import ORDERS, NgramCounts, Tokens
from drafter_service.session import Abilities, Cache, PassRows
from drafter_service.settings import DrafterSettings
from outrider.lm.load.model import load_tokenizer
from outrider.tokens import TokenTable
from speculative.errors import InvalidRequest

log = logging.getLogger(__name__)

_MOST_TOKENS = 16_000_000
"""Tokens of the texts that are counted; counting them takes about a gigabyte for a while."""
_PIECE = 1 << 20
"""Characters that are encoded at a time."""
_LONGEST = 1 << 24


class NgramCache:
    """The ids of one session, under the bookkeeping of a model's cache."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        """Committed ids."""
        self._tokens: list[int] = []
        self._parents: list[int] = []

    @property
    def length(self) -> int:
        """Number of committed ids."""
        return len(self.ids)

    @length.setter
    def length(self, length: int) -> None:
        del self.ids[length:]

    def add(self, rows: PassRows) -> int:
        """Adds rows as nodes; returns the index of the first."""
        first = len(self._tokens)
        self._tokens += rows.tokens
        self._parents += rows.parents
        return first

    def context(self, node: int, most: int) -> list[int]:
        """The last ids up to a node, at most `most`."""
        path: list[int] = []
        while node >= 0 and len(path) < most:
            path.append(self._tokens[node])
            node = self._parents[node]
        left = most - len(path)
        return [*(self.ids[-left:] if left else ()), *reversed(path)]

    def commit(self, path: Sequence[int]) -> list[int]:
        """Commits a chain of nodes; maps old node indices to new ones, -1 for nodes that are gone."""
        if not path:
            return list(range(len(self._tokens)))
        self.ids += [self._tokens[node] for node in path]
        mapping, last, kept = [-1] * len(self._tokens), path[-1], 0
        for node, parent in enumerate(self._parents):
            if parent == last or (parent >= 0 and mapping[parent] >= 0):
                mapping[node], kept = kept, kept + 1
        left = [node for node, new in enumerate(mapping) if new >= 0]
        self._parents = [-1 if self._parents[node] == last else mapping[self._parents[node]] for node in left]
        self._tokens = [self._tokens[node] for node in left]
        return mapping

    def drop_nodes(self) -> None:
        """Forgets every node."""
        self._tokens, self._parents = [], []


class NgramDrafter:
    """Drafts by counts of n-grams.

    Args:
        model: name of the counts, for people.
        tokens: the tokenizer of the sessions.
        counts: counts over ids of this tokenizer.
    """

    numerics = "numpy float32"

    def __init__(self, model: str, tokens: TokenTable, counts: NgramCounts) -> None:
        self.model = model
        self.tokenizer_digest = tokens.digest
        self.abilities = Abilities(width=tokens.size, bound=tokens.size, max_length=_LONGEST)
        self._counts = counts
        self._caches: set[NgramCache] = set()

    @classmethod
    def load(cls, settings: DrafterSettings) -> Self:
        """Counts the texts that the settings name. Raises InvalidRequest where there are none."""
        tokenizer = load_tokenizer(settings.model)
        if tokenizer is None:
            raise InvalidRequest(f"model {settings.model!r} has no tokenizer, with which n-grams are counted")
        if not settings.ngram_text:
            raise InvalidRequest("a drafter of kind ngram counts texts: give --ngram-text FILE,FILE")
        tokens = TokenTable.from_json(tokenizer.json)
        ids = _encoded(tokens, settings.ngram_text)
        if not len(ids):
            raise InvalidRequest(
                f"there is no text in {', '.join(settings.ngram_text)}; name files that hold text"
            )
        counts = NgramCounts(ids, tokens.size, settings.ngram_mb * 2**20)
        return cls(f"n-grams of {len(ids):,} tokens", tokens, counts)

    def open(self, reserve: int) -> NgramCache:
        """Opens an empty cache."""
        cache = NgramCache()
        self._caches.add(cache)
        return cache

    def close(self, cache: Cache) -> None:
        """Frees the cache's memory."""
        self._caches.discard(_own(cache))

    def rewind(self, cache: Cache, length: int) -> None:
        """Shortens the cache to its first `length` ids."""
        cache.drop_nodes()
        cache.length = length

    def forward(self, batch: Sequence[tuple[Cache, PassRows]]) -> NDArray[np.float32]:
        """Log-probabilities after each wanted row, float32[rows, vocabulary]."""
        found = []
        for cache, rows in batch:
            own = _own(cache)
            first = own.add(rows)
            found += [self._counts.logprobs(own.context(first + row, ORDERS[-1])) for row in rows.want]
        return np.stack(found) if found else np.zeros((0, self.abilities.width), np.float32)

    def shut_down(self) -> None:
        """Drops what was counted for open sessions."""
        self._caches.clear()

    @property
    def cached_tokens(self) -> int:
        """Number of ids that the open caches hold; from any thread."""
        return sum(cache.length for cache in list(self._caches))


def _own(cache: Cache) -> NgramCache:
    assert isinstance(cache, NgramCache), "caches come from `open`"
    return cache


def _encoded(tokens: TokenTable, files: Sequence[str]) -> Tokens:
    """Ids of the files' texts, up to a bound, uint32[N]. Raises InvalidRequest for a file without text."""
    parts, left = [], _MOST_TOKENS
    for piece in _pieces(files):
        ids = np.asarray(tokens.encode(piece, add_special=False), dtype=np.uint32)[:left]
        parts.append(ids)
        left -= len(ids)
        if left <= 0:
            log.warning("only the first %s tokens of the texts are counted", f"{_MOST_TOKENS:,}")
            break
    return np.concatenate(parts) if parts else np.zeros(0, np.uint32)


def _pieces(files: Sequence[str]) -> Iterator[str]:
    """The files' texts in pieces that end with a line where the text has lines."""
    for name in files:
        try:
            with Path(name).open(encoding="utf-8") as file:
                while lines := file.readlines(_PIECE):
                    yield "".join(lines)
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"text {name!r} cannot be read: {error}") from error
