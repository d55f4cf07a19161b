"""Passages, what finds them, and those found so far. Knows nothing of models and requests."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class RagPassage:
    """A text that may be put before the prompt."""

    name: str
    """Unique among the passages of a retriever."""
    text: str


class Retriever(Protocol):
    """Finds passages by a query's text.

    The passages of a query must not depend on the other queries of the search, nor on `count` beyond how many
    there are; otherwise speculation could change the answer.
    """

    def search(self, queries: Sequence[str], count: int) -> list[list[RagPassage]]:
        """Up to `count` passages for each query, best first. One call for many queries."""
        ...

    def scores(self, query: str, passages: Sequence[RagPassage]) -> list[float]:
        """How well each passage suits the query, higher is better; without a search.

        Guesses of later searches come from these scores, so wrong ones cost time and change nothing.
        """
        ...


class FoundPassages:
    """The passages that searches of one request have found, up to a number; the oldest are dropped."""

    def __init__(self, retriever: Retriever, most: int) -> None:
        self._retriever = retriever
        self._most = most
        self._found: dict[str, RagPassage] = {}

    def __len__(self) -> int:
        return len(self._found)

    def add(self, passages: Sequence[RagPassage]) -> None:
        """Takes over the passages of one search, best first."""
        for passage in reversed(passages):
            self._found.pop(passage.name, None)
            self._found[passage.name] = passage
        while len(self._found) > self._most:
            self._found.pop(next(iter(self._found)))

    def best(self, query: str) -> RagPassage | None:
        """The passage that a search for the query is likeliest to find; None if there are no passages."""
        passages = list(self._found.values())
        if not passages:
            return None
        scores = self._retriever.scores(query, passages)
        # Of equals the one found last, which is the likeliest to be found again.
        return max(zip(scores, range(len(passages)), passages, strict=True), key=lambda found: found[:2])[2]
