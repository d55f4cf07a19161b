"""Scores a prompt: the log-probabilities of its tokens, from the logits of the rows before them.

Pure: digests of logits in, log-probabilities out. Belongs to a session.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from speculative.digest import RowAsk, RowDigest
from speculative.logprobs import TokenLogprob
from speculative.target_sampler import raw_logprob
from verifier_service.sessions.request import SessionRequest

SCORED_AT_ONCE = 64
"""The most rows that one step scores, of all sessions together: others wait while the host does."""


class PromptScores(NamedTuple):
    """The tokens of a prompt that one step scored."""

    position: int
    """Absolute position of the first token."""
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    """Log-probabilities of each token."""


class PromptScorer:
    """Scores the tokens of one prompt in order, each once, even where steps compute positions again.

    Args:
        prompt: token ids of the prompt.
        position: position of the first token to score; at least 1.
        top: number of likeliest ids to give beside each token.
    """

    def __init__(self, prompt: Sequence[int], position: int, top: int) -> None:
        self._prompt = prompt
        self._position = position
        self._top = top

    @property
    def done(self) -> bool:
        """Whether every token of the prompt has its score."""
        return self._position >= len(self._prompt)

    def rows(self, cached: int, end: int) -> range:
        """Rows of a step that score tokens; the step computes the positions `cached` to `end - 1`."""
        first = max(0, self._position - 1 - cached)
        return range(first, max(first, min(end, len(self._prompt) - 1) - cached))

    def asks(self, rows: range, cached: int) -> list[RowAsk]:
        """The questions that scoring asks of these rows' logits, one RowAsk a row."""
        return [RowAsk(named=(self._prompt[cached + row + 1],), top=self._top) for row in rows]

    def score(self, rows: range, cached: int, digests: Callable[[int], RowDigest]) -> PromptScores:
        """The scores behind these rows.

        `digests` gives the digest of a row, counted from 0 for the first of them.
        """
        first = cached + rows.start + 1
        tokens = tuple(self._prompt[first : first + len(rows)])
        self._position = first + len(rows)
        scores = [raw_logprob(digests(at), token, self._top) for at, token in enumerate(tokens)]
        return PromptScores(first, tokens, tuple(scores))


def rows_with_scores(scorers: Sequence[PromptScorer | None], rows: Sequence[int]) -> list[int]:
    """Rows of each session in one step: `rows`, or fewer (at least one) where a prompt is scored."""
    left, sizes = SCORED_AT_ONCE, []
    for scorer, size in zip(scorers, rows, strict=True):
        if scorer is not None and not scorer.done:
            size = min(size, max(1, left))
            left -= size
        sizes.append(size)
    return sizes


def scorer_of(request: SessionRequest) -> PromptScorer | None:
    """The scorer of a request's prompt; None where the request does not ask for scores."""
    if request.score_from is None or request.logprobs is None:
        return None
    prompt = request.ids[: request.prompt_length]
    return PromptScorer(prompt, request.score_from, request.logprobs.top_logprobs)
