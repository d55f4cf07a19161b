"""Look-ahead embeddings: the target reads them as it will while serving, and they learn what it says next."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from outrider.lm.plan import SequenceRows
from outrider.lm.runner import PackedLM
from tests.training.conftest import TEXTS, quiet
from training.heads.frozen import FrozenTarget
from training.heads.job import distil
from training.heads.look_ahead import TrainedLookAhead
from training.heads.recipe import DistilOptions
from training.heads.unrolled import unrolled


def test_training_reads_look_ahead_tokens_as_serving_does(target: Path) -> None:
    """Behind several roots at once, each sees the text up to its root, and no other root's."""
    frozen = FrozenTarget.load(str(target), "cpu")
    head = TrainedLookAhead(frozen, 3)
    ids, roots = torch.arange(30).reshape(1, 30) + 7, torch.tensor([3, 9, 20])
    with torch.no_grad():
        trained = [logits for logits, _ in unrolled(head, ids, torch.empty(0), 3, roots)]
    served = PackedLM.load(target, check=False)
    known = served.add_embeddings(head.embeddings.detach())
    for at, root in enumerate(roots.tolist()):
        table = served.table()
        text = [*ids[0, : root + 1].tolist(), *known]
        outcome = served.forward(
            [SequenceRows(table, text, range(-1, len(text) - 1), range(root + 1, root + 4))]
        )
        for place in range(3):
            expected = torch.from_numpy(outcome.row(place))
            assert torch.allclose(trained[place][0, at], expected, atol=1e-4)


@pytest.mark.slow
def test_look_ahead_embeddings_learn_and_the_target_stays_as_it_is(options: DistilOptions) -> None:
    trained = replace(options, kind="pass", steps=120, rate=5e-2, held_tokens=24)
    before = FrozenTarget.load(options.target, "cpu").output_weights.clone()
    result = distil(trained, TEXTS, quiet)
    found = result["acceptance"]["greedy"]
    assert found["after"]["acceptance_length"] > found["before"]["acceptance_length"]
    assert result["parameters"] == 3 * 32
    assert torch.equal(before, FrozenTarget.load(options.target, "cpu").output_weights)
