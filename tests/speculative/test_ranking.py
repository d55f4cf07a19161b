"""Children of a node: ranked as the target chooses, each with a probability."""

import numpy as np
import pytest

from speculative.digest import HostDigest
from speculative.errors import EmptySupport
from speculative.history import History
from speculative.noise import gumbel
from speculative.params import SamplingParams
from speculative.ranking import ChildRanker
from speculative.sampling import process_logits, sample_token

WIDTH, IDS, SEED = 40, (3, 5, 3, 9), 12


def ranking(
    params: SamplingParams, *, children: int = 3, scale: float = 1.0, width: int = WIDTH, bound: int = WIDTH
) -> ChildRanker:
    return ChildRanker(params, SEED, IDS, 2, width=width, bound=bound, children=children, scale=scale)


def logits(seed: int) -> np.ndarray:
    drawn: np.ndarray = np.random.default_rng(seed).normal(0, 3, WIDTH).astype(np.float32)
    return drawn


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0),
        SamplingParams(temperature=0, repetition_penalty=1.5, frequency_penalty=2.0),
        SamplingParams(temperature=0.8),
        SamplingParams(temperature=1.3, top_k=5, min_p=0.05),
        SamplingParams(temperature=0.7, top_p=0.9, presence_penalty=1.0, logit_bias=((7, 4.0), (8, -4.0))),
        SamplingParams(temperature=0.7, min_tokens=4, stop_ids=tuple(range(0, WIDTH, 2))),
    ],
    ids=["greedy", "greedy-penalised", "sampled", "cut", "all", "ends late"],
)
def test_the_first_child_is_what_a_target_of_these_logits_chooses(params: SamplingParams) -> None:
    ranks = ranking(params)
    for seed in range(50):
        path = (seed % WIDTH, 9)[: seed % 3] if ranks.reads_path else ()
        position = len(IDS) + len(path)
        history = History.of(IDS, 2).with_path(path)
        chosen = sample_token(logits(seed), params, history, gumbel(SEED, position, WIDTH))
        assert ranks.children(HostDigest(logits(seed)), position, path)[0][0] == chosen


def test_children_come_in_order_and_share_at_most_one() -> None:
    children = ranking(SamplingParams(temperature=0.9), children=6).children(HostDigest(logits(1)), 4, ())
    shares = [share for _, share in children]
    assert shares == sorted(shares, reverse=True)
    assert 0 < sum(shares) <= 1
    assert len({token for token, _ in children}) == 6


def test_equals_are_ranked_by_id() -> None:
    flat = np.zeros(WIDTH, dtype=np.float32)
    assert [
        token for token, _ in ranking(SamplingParams(temperature=0)).children(HostDigest(flat), 4, ())
    ] == [0, 1, 2]


def test_greedy_survival_is_the_softmax_of_logits_over_the_scale() -> None:
    scores = logits(2)
    weights = np.exp(scores.astype(float) / 1.7)
    for token, share in ranking(SamplingParams(temperature=0), scale=1.7).children(HostDigest(scores), 4, ()):
        assert share == pytest.approx(weights[token] / weights.sum(), rel=1e-5)


def test_a_score_is_a_logit_and_the_noise_times_the_temperature() -> None:
    temperature = 0.6
    scores = logits(3) + temperature * gumbel(SEED, 4, WIDTH)
    weights = np.exp(scores / 1.7)
    for token, share in ranking(SamplingParams(temperature=temperature), scale=1.7).children(
        HostDigest(logits(3)), 4, ()
    ):
        assert share == pytest.approx(weights[token] / weights.sum(), rel=1e-5)


def test_ids_past_the_bound_are_no_children_but_take_their_share() -> None:
    scores = np.zeros(WIDTH, dtype=np.float32)
    scores[30] = 5
    children = ranking(SamplingParams(temperature=0), bound=20).children(HostDigest(scores), 4, ())
    assert [token for token, _ in children] == [0, 1, 2]
    assert sum(share for _, share in children) < 0.1


def test_a_bias_for_ids_past_the_width_does_not_matter() -> None:
    scores = logits(4)
    biased = SamplingParams(temperature=0.5, logit_bias=((2, 3.0), (35, 9.0)))
    digest = HostDigest(scores[:30])
    children = ranking(biased, width=30, bound=30).children(digest, 4, ())
    plainly = SamplingParams(temperature=0.5, logit_bias=((2, 3.0),))
    assert children == ranking(plainly, width=30, bound=30).children(digest, 4, ())


def test_dropped_tokens_are_no_children() -> None:
    assert len(ranking(SamplingParams(temperature=1, top_k=2)).children(HostDigest(logits(5)), 4, ())) == 2


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0, 1])
def test_logits_that_rank_nothing_are_an_error(bad: float, temperature: float) -> None:
    with pytest.raises(EmptySupport):
        ranking(SamplingParams(temperature=temperature)).children(
            HostDigest(np.full(WIDTH, bad, dtype=np.float32)), 4, ()
        )


def test_the_models_own_logits_are_left_as_they_were() -> None:
    scores = logits(6)
    ranking(SamplingParams(temperature=0)).children(HostDigest(scores), 4, ())
    np.testing.assert_array_equal(scores, logits(6))


@pytest.mark.parametrize("spread", [0.3, 2.0, 5.0], ids=["flat", "between", "peaked"])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.3),
        SamplingParams(temperature=0.8),
        SamplingParams(temperature=1.2, repetition_penalty=1.2),
        SamplingParams(temperature=0.8, top_p=0.9),
        SamplingParams(temperature=0.8, top_k=20, min_p=0.01),
    ],
    ids=["greedy", "cold", "sampled", "penalised", "nucleus", "cut"],
)
def test_a_wide_vocabulary_is_ranked_as_its_whole_row(params: SamplingParams, spread: float) -> None:
    """The order is exact; the shares are estimates: the sum has the median noise of each lead."""
    width, errors = 20_000, list[float]()
    ranks = ChildRanker(params, SEED, IDS, 2, width=width, bound=width, children=4, scale=0.65)
    history = History.of(IDS, 2)
    for position in range(4, 24):
        row = (np.random.default_rng(position).normal(size=width) * spread).astype(np.float32)
        scores = process_logits(row, params, history)
        if not params.greedy:
            scores += gumbel(SEED, position, width)
        weights = np.exp((scores - scores.max()) * (1 if params.greedy else params.temperature) / 0.65)
        children = ranks.children(HostDigest(row), position, ())
        ids, shares = [token for token, _ in children], [share for _, share in children]
        assert ids == np.argsort(-scores, kind="stable")[: len(ids)].tolist()
        errors += np.log(np.array(shares) * weights.sum() / weights[ids]).tolist()
    assert abs(float(np.mean(errors))) < 0.1
    assert max(map(abs, errors)) < 0.25
