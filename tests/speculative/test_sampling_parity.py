"""Against transformers' own processors: the same tokens survive, with the same probabilities."""

from typing import Any

import numpy as np
import pytest

from speculative.history import History
from speculative.params import SamplingParams
from speculative.sampling import process_logits

torch = pytest.importorskip("torch")
warpers = pytest.importorskip("transformers.generation.logits_process")

CASES: list[tuple[dict[str, Any], list[tuple[str, Any]]]] = [
    ({"temperature": 0.7}, [("TemperatureLogitsWarper", 0.7)]),
    ({"top_k": 17}, [("TopKLogitsWarper", 17)]),
    ({"top_p": 0.83}, [("TopPLogitsWarper", 0.83)]),
    ({"min_p": 0.07}, [("MinPLogitsWarper", 0.07)]),
    ({"repetition_penalty": 1.4}, [("RepetitionPenaltyLogitsProcessor", 1.4)]),
    (
        {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.03, "repetition_penalty": 0.8},
        [
            ("RepetitionPenaltyLogitsProcessor", 0.8),
            ("TemperatureLogitsWarper", 0.8),
            ("TopKLogitsWarper", 40),
            ("TopPLogitsWarper", 0.9),
            ("MinPLogitsWarper", 0.03),
        ],
    ),
]


@pytest.mark.parametrize(("fields", "theirs"), CASES, ids=[" ".join(fields) for fields, _ in CASES])
@pytest.mark.parametrize("seed", range(10))
def test_the_same_tokens_survive_with_the_same_probabilities(
    fields: dict[str, Any], theirs: list[tuple[str, Any]], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    logits = (rng.normal(size=300) * 3).astype(np.float32)
    ids = rng.integers(0, 300, 40).tolist()
    ours = process_logits(logits, SamplingParams(**fields), History.of(ids, 20))
    scores = torch.tensor(logits, dtype=torch.float64)[None]
    for name, argument in theirs:
        scores = getattr(warpers, name)(argument)(torch.tensor([ids]), scores)
    assert np.array_equal(ours > -np.inf, scores[0].numpy() > -np.inf)
    np.testing.assert_allclose(
        torch.softmax(torch.tensor(ours), 0).numpy(),
        torch.softmax(scores[0], 0).numpy(),
        rtol=1e-9,
        atol=1e-15,
    )
