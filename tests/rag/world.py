"""A world for the loops without a model: what a search finds and what a model writes are hashes."""

import hashlib
from collections.abc import Callable, Sequence

from outrider.rag.loops import (
    Found,
    Loop,
    RagLimits,
    RagPiece,
    RagText,
    Search,
    WantPiece,
    plain_loop,
)
from outrider.rag.passages import RagPassage
from speculative.stop import FinishReason

PASSAGES = tuple(RagPassage(f"p{number}", f"text {number}") for number in range(5))
END = 0
"""The id that ends a text."""


def hashed(*parts: object, below: int) -> int:
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest) % below


class World:
    """Answers what loops want. `seed` chooses a world; one search in six finds nothing at all."""

    def __init__(self, seed: int, vocabulary: int = 40) -> None:
        self._seed = seed
        self._vocabulary = vocabulary
        self.searches: list[int] = []
        """Number of queries of each search."""

    def search(self, queries: Sequence[str], count: int) -> list[list[RagPassage]]:
        return [self._found(query)[:count] for query in queries]

    def scores(self, query: str, passages: Sequence[RagPassage]) -> list[float]:
        best = self._found(query)
        return [-best.index(passage) if passage in best else -9.0 for passage in passages]

    def true_passage(self, query: str) -> RagPassage | None:
        found = self._found(query)
        return found[0] if found else None

    def _found(self, query: str) -> list[RagPassage]:
        first = hashed(self._seed, query, below=len(PASSAGES) + 1)
        return [*PASSAGES[first:], *PASSAGES[:first]] if first < len(PASSAGES) else []

    def piece(self, wanted: WantPiece) -> RagPiece:
        name = None if wanted.passage is None else wanted.passage.name
        ids: list[int] = []
        for _ in range(wanted.tokens):
            ids.append(hashed(self._seed, name, wanted.ids, ids, below=self._vocabulary))
            if ids[-1] == END:
                return RagPiece(tuple(ids), FinishReason.STOP, 0.0)
        return RagPiece(tuple(ids), FinishReason.LENGTH, 0.0)

    def run(self, loop: Loop) -> RagText:
        reply: Found | RagPiece | None = None
        while True:
            try:
                wanted = loop.send(reply)
            except StopIteration as ended:
                text: RagText = ended.value
                return text
            if isinstance(wanted, Search):
                self.searches.append(len(wanted.queries))
                reply = Found(self.search(wanted.queries, wanted.most), 0.0)
            else:
                reply = self.piece(wanted)


def new_text(most: int = 12, every: int = 2, **limits: object) -> RagText:
    query_of: Callable[[Sequence[int]], str] = repr
    return RagText((7, 8), most, RagLimits(every=every, query_tokens=4, **limits), query_of)  # type: ignore[arg-type]


def plain(world: World, most: int = 12, every: int = 2) -> RagText:
    return world.run(plain_loop(new_text(most, every)))
