"""A short list of likeliest ids ranks as the whole row would, and rubbish is refused in words."""

import math

import numpy as np
import pytest

from outrider.edge.top_k import DraftModelFailed, TopK, TopKDigest
from speculative.digest import HostDigest
from speculative.params import SamplingParams
from speculative.ranking import ChildRanker

WIDTH = 4000


def row(seed: int) -> np.ndarray:
    """A peaked row, as of a language model: the 64 likeliest ids hold nearly all probability."""
    drawn = np.random.default_rng(seed)
    logits = drawn.normal(0, 1, WIDTH).astype(np.float32)
    logits[drawn.choice(WIDTH, 20, replace=False)] += drawn.uniform(8, 14, 20).astype(np.float32)
    return logits


def listed(logits: np.ndarray, count: int = 64) -> TopK:
    logprobs = logits - np.log(np.exp(logits.astype(np.float64)).sum())
    order = np.argsort(-logits, kind="stable")[:count]
    return TopK.of([(int(id_), float(logprobs[id_])) for id_ in order])


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0),
        SamplingParams(),
        SamplingParams(temperature=0.6, top_p=0.95, top_k=20),
        SamplingParams(temperature=0.8, min_p=0.05),
        SamplingParams(presence_penalty=1.5, repetition_penalty=1.2),
        SamplingParams(temperature=0.7, logit_bias=((3, 5.0), (7, -100.0))),
    ],
    ids=lambda params: (
        f"{params.temperature}-{params.top_p}-{params.presence_penalty}-{len(params.logit_bias)}"
    ),
)
def test_the_best_child_is_that_of_the_whole_row(params: SamplingParams) -> None:
    equal, shares = 0, []
    for seed in range(60):
        logits = row(seed)

        def ranker(seed: int = seed) -> ChildRanker:
            return ChildRanker(params, seed, (1, 2, 3), 2, width=WIDTH, bound=WIDTH, children=1, scale=0.65)

        (whole, share), (short, guessed) = (
            ranker().children(digest, 3, ())[0]
            for digest in (HostDigest(logits), TopKDigest(listed(logits), WIDTH))
        )
        equal += whole == short
        shares.append(abs(share - guessed))
        assert 0 < guessed <= 1
    assert equal >= 58, "only noise beyond the list's mass may make a difference"
    assert float(np.median(shares)) < 0.05


def test_ids_that_the_target_lacks_are_ignored() -> None:
    digest = TopKDigest(TopK.of([(900, -0.1), (5, -3.0)]), 100)
    assert digest.highest() == (5, -3.0)
    with pytest.raises(DraftModelFailed, match="the target has 4 ids"):
        TopKDigest(TopK.of([(900, -0.1)]), 4)


def test_unknown_ids_are_far_below_the_known_ones() -> None:
    digest = TopKDigest(TopK.of([(7, -0.5), (2, -1.5)]), 10)
    assert digest.at(np.array([2, 3, 7])).tolist() == [-1.5, -1e4, -0.5]
    assert digest.full().argmax() == 7
    assert digest.ranked_before(3, -2.0) == 2


@pytest.mark.parametrize(
    "pairs", [[], [(-1, -1.0)], [(2**32, -1.0)], [(1, math.nan)], [(1, 0.5)], [(1, -math.inf)]]
)
def test_rubbish_is_refused(pairs: list[tuple[int, float]]) -> None:
    with pytest.raises(DraftModelFailed):
        TopK.of(pairs)
