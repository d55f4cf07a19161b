"""Which rows score which tokens of a prompt."""

from typing import Any

import numpy as np
import pytest

from speculative.digest import HostDigest, RowDigest
from verifier_service.engine.prompt_scorer import SCORED_AT_ONCE, PromptScorer, rows_with_scores

PROMPT = (5, 3, 1, 4, 1, 0, 2)
LOGITS = np.random.default_rng(3).normal(size=(len(PROMPT), 6)).astype(np.float32)


def scored(scorer: PromptScorer, cached: int, end: int) -> list[tuple[int, int, float]]:
    """Position, token and log-probability of what a step over these positions scores."""
    rows = scorer.rows(cached, end)
    if not rows:
        return []

    def digest(at: int) -> RowDigest:
        return HostDigest(LOGITS[cached + rows[at]])

    done = scorer.score(rows, cached, digest)
    logprobs = [found.logprob for found in done.logprobs]
    return list(zip(range(done.position, len(PROMPT)), done.tokens, logprobs, strict=False))


def expected(first: int, end: int) -> list[Any]:
    softmax = LOGITS - np.log(np.exp(LOGITS).sum(axis=1, keepdims=True))
    found = [(at, PROMPT[at], softmax[at - 1, PROMPT[at]]) for at in range(first, end)]
    return [(at, token, pytest.approx(float(logprob), abs=1e-5)) for at, token, logprob in found]


@pytest.mark.parametrize("cuts", [(7,), (1, 2, 3, 4, 5, 6, 7), (3, 7), (6, 7)])
def test_each_token_but_the_first_is_scored_once(cuts: tuple[int, ...]) -> None:
    scorer, cached, found = PromptScorer(PROMPT, 1, 0), 0, []
    for end in cuts:
        found += scored(scorer, cached, end)
        cached = end
    assert found == expected(1, len(PROMPT))
    assert scorer.done


def test_what_is_computed_again_is_not_scored_again() -> None:
    scorer = PromptScorer(PROMPT, 1, 0)
    assert scored(scorer, 0, 3) == expected(1, 4)
    assert scored(scorer, 0, 2) == [], "the session lost its memory, and starts anew"
    assert scored(scorer, 2, 7) == expected(4, 7)


def test_a_prompt_is_scored_from_any_token_on() -> None:
    assert scored(PromptScorer(PROMPT, 4, 0), 0, 7) == expected(4, 7)


def test_a_prompt_of_one_token_has_nothing_to_score() -> None:
    scorer = PromptScorer(PROMPT[:1], 1, 0)
    assert scorer.done
    assert not scorer.rows(0, 1)


def test_a_row_is_asked_for_the_token_behind_it() -> None:
    asks = PromptScorer(PROMPT, 1, 5).asks(range(1, 3), cached=2)
    assert [(ask.named, ask.top) for ask in asks] == [((PROMPT[4],), 5), ((PROMPT[5],), 5)]


def test_a_step_scores_so_many_rows_of_all_sessions_together() -> None:
    long = PromptScorer(range(1000), 1, 0)
    sizes = rows_with_scores([None, long, long, PromptScorer(PROMPT[:1], 1, 0)], [100, 50, 50, 30])
    assert sizes == [100, 50, SCORED_AT_ONCE - 50, 30]
    assert rows_with_scores([long] * 3, [SCORED_AT_ONCE] * 3) == [SCORED_AT_ONCE, 1, 1]
