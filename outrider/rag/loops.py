"""Two loops of retrieval-augmented generation: the plain one, and one that guesses what searches find.

Pure: a loop is a generator that yields what it wants done, a `Search` or a `WantPiece`, and is sent the
result. Both loops end in the same text: a piece depends on its passage and the ids before it alone, and
only pieces under the passages that searches found are kept.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from outrider.rag.passages import FoundPassages, RagPassage
from outrider.rag.stride import MOST, AdaptiveStride, FixedStride, Stride
from speculative.errors import InvalidRequest
from speculative.stop import FinishReason


@dataclass(frozen=True, slots=True)
class RagLimits:
    """How text and searches take turns. Raises InvalidRequest."""

    every: int = 8
    """Tokens that are generated under one passage, before the next search."""
    query_tokens: int = 32
    """Last tokens of prompt and text that make a query."""
    passage_tokens: int = 256
    """The most tokens of a passage; the rest is cut off."""
    guesses: int | Literal["adaptive"] = 3
    """Retrievals guessed before a search verifies them, 1 to 16; adaptive: as accuracy and times suggest."""
    prefetch: int = 1
    """Passages that each search brings, to guess from later; at least 1."""
    kept: int = 256
    """The most passages kept to guess from, per request."""

    def __post_init__(self) -> None:
        for name in ("every", "query_tokens", "passage_tokens", "prefetch", "kept"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise InvalidRequest(f"{name} is {value!r}; it must be a whole number of at least 1")
        guesses = self.guesses
        if guesses != "adaptive" and (type(guesses) is not int or not 1 <= guesses <= MOST):
            raise InvalidRequest(f"guesses is {guesses!r}; it must be 1 to {MOST}, or 'adaptive'")

    def stride(self) -> Stride:
        """A new request's stride."""
        return AdaptiveStride() if self.guesses == "adaptive" else FixedStride(self.guesses)


class Search(NamedTuple):
    """A search that a loop wants done; the reply is `Found`."""

    queries: tuple[str, ...]
    most: int
    """The most passages of each query."""


class Found(NamedTuple):
    """What a search found."""

    passages: Sequence[Sequence[RagPassage]]
    """Passages of each query, best first."""
    seconds: float


class WantPiece(NamedTuple):
    """A piece of text that a loop wants generated; the reply is `RagPiece`."""

    passage: RagPassage | None
    """The passage before the prompt; None: no passage was found."""
    ids: tuple[int, ...]
    """Ids of the prompt and of the text so far."""
    generated: int
    """Number of ids of the text so far."""
    tokens: int
    """The most tokens of the piece."""


class RagPiece(NamedTuple):
    """A piece of generated text."""

    ids: tuple[int, ...]
    reason: FinishReason
    """LENGTH where the piece has all of its tokens, or the context is full."""
    seconds: float


@dataclass(slots=True)
class RagCounts:
    """What one answer took."""

    searches: int = 0
    queries: int = 0
    """Queries of all searches together."""
    guesses: int = 0
    """Retrievals that were guessed and verified."""
    right: int = 0
    """Guesses that were right, up to the first wrong one of each search."""
    wrong: int = 0
    """Searches that found a wrong guess; what was guessed behind it counts nowhere."""
    pieces: int = 0
    """Requests to the model."""
    discarded: int = 0
    """Tokens generated behind a wrong guess, and thrown away."""
    search_s: float = 0.0
    piece_s: float = 0.0

    @property
    def accuracy(self) -> float:
        """Share of right guesses; 1 without any guess."""
        return self.right / (self.right + self.wrong) if self.right + self.wrong else 1.0

    def verified(self, guesses: int, right: int) -> None:
        """Counts the guesses of one search."""
        self.guesses += guesses
        self.right += right
        self.wrong += right < guesses


@dataclass(slots=True)
class RagText:
    """Text as it is generated, and what it took.

    Args:
        prompt: ids of the prompt, without any passage.
        most: the most tokens to generate.
        limits: how text and searches take turns.
        query_of: the query that these last ids make.
    """

    prompt: tuple[int, ...]
    most: int
    limits: RagLimits
    query_of: Callable[[Sequence[int]], str]
    ids: list[int] = field(default_factory=list)
    passages: list[RagPassage | None] = field(default_factory=list)
    """RagPassage of each piece."""
    reason: FinishReason | None = None
    counts: RagCounts = field(default_factory=RagCounts)

    def query(self) -> str:
        """The query at the end of the text."""
        return self.query_of((*self.prompt, *self.ids)[-self.limits.query_tokens :])

    def want(self, passage: RagPassage | None) -> WantPiece:
        """The next piece under a passage."""
        tokens = min(self.limits.every, self.most - len(self.ids))
        return WantPiece(passage, (*self.prompt, *self.ids), len(self.ids), tokens)

    def take(self, wanted: WantPiece, piece: RagPiece) -> None:
        """Appends a piece that was wanted, and ends the text where the piece says so."""
        self.ids += piece.ids
        self.passages.append(wanted.passage)
        self.counts.pieces += 1
        self.counts.piece_s += piece.seconds
        full = len(piece.ids) < wanted.tokens or len(self.ids) >= self.most
        if piece.reason is not FinishReason.LENGTH or full:
            self.reason = piece.reason

    def rewind(self, tokens: int, pieces: int) -> None:
        """Goes back to a number of tokens and pieces; an end behind them is undone."""
        self.counts.discarded += len(self.ids) - tokens
        del self.ids[tokens:]
        del self.passages[pieces:]
        self.reason = None


Loop = Generator[Search | WantPiece, Any, RagText]
"""Yields what it wants done, is sent `Found` or `RagPiece`, and returns the finished text."""


class _RetrievalGuess(NamedTuple):
    query: str
    passage: RagPassage | None
    tokens: int
    """Tokens of the text before the guess, and pieces."""
    pieces: int
    seconds: float = 0.0


def plain_loop(text: RagText) -> Loop:
    """Searches before every piece, and waits for the search."""
    while text.reason is None:
        found = yield from _search(text, (text.query(),), 1)
        yield from _piece(text, _first(found.passages[0]))
    return text


def speculative_loop(text: RagText, known: FoundPassages, stride: Stride) -> Loop:
    """Guesses what searches find, from passages that earlier searches found, and verifies many at once."""
    first = yield from _search(text, (text.query(),), text.limits.prefetch)
    known.add(first.passages[0])
    yield from _piece(text, _first(first.passages[0]))
    while text.reason is None:
        guesses = yield from _guess(text, known, stride.guesses)
        queries = tuple(guess.query for guess in guesses)
        found = yield from _search(text, queries, text.limits.prefetch)
        right = _right(guesses, found)
        for passages in found.passages[: right + 1]:
            known.add(passages)
        text.counts.verified(len(guesses), right)
        stride.saw(len(guesses), right, [guess.seconds for guess in guesses], found.seconds)
        if right < len(guesses):
            text.rewind(guesses[right].tokens, guesses[right].pieces)
            yield from _piece(text, _first(found.passages[right]))
    return text


def _guess(
    text: RagText, known: FoundPassages, most: int
) -> Generator[Search | WantPiece, Any, list[_RetrievalGuess]]:
    guesses: list[_RetrievalGuess] = []
    while len(guesses) < most and text.reason is None:
        query = text.query()
        guess = _RetrievalGuess(query, known.best(query), len(text.ids), len(text.passages))
        seconds = yield from _piece(text, guess.passage)
        guesses.append(guess._replace(seconds=seconds))
    return guesses


def _right(guesses: Sequence[_RetrievalGuess], found: Found) -> int:
    """Number of guesses before the first wrong one."""
    for place, (guess, passages) in enumerate(zip(guesses, found.passages, strict=True)):
        if guess.passage != _first(passages):
            return place
    return len(guesses)


def _first(passages: Sequence[RagPassage]) -> RagPassage | None:
    return passages[0] if passages else None


def _search(text: RagText, queries: tuple[str, ...], count: int) -> Generator[Search | WantPiece, Any, Found]:
    found: Found = yield Search(queries, count)
    text.counts.searches += 1
    text.counts.queries += len(queries)
    text.counts.search_s += found.seconds
    return found


def _piece(text: RagText, passage: RagPassage | None) -> Generator[Search | WantPiece, Any, float]:
    wanted = text.want(passage)
    piece: RagPiece = yield wanted
    text.take(wanted, piece)
    return piece.seconds
