"""Graphs whose intermediates hold garbage between replays, and that share memory with one another."""

import random

import numpy as np
import pytest
import torch

from outrider.lm.device.digest import RowDigester
from outrider.lm.graphs import backend_choice
from outrider.lm.outcome import OutcomeWants
from outrider.lm.plan import SequenceRows
from outrider.lm.runner import PackedLM
from speculative.digest import RowAsk
from tests.gpu.recorded_graphs import RecordedGraphs
from tests.lm.families import VOCABULARY, logits_of, model_of, twin_of
from tests.lm.test_graphs import Pair, attend_everything


def pair_of_models(family: str, graphs: RecordedGraphs) -> tuple[PackedLM, PackedLM]:
    """One model twice: in recorded graphs, and ragged."""
    model = model_of(family, num_hidden_layers=2)
    recorded, ragged = PackedLM(twin_of(model)), PackedLM(model)
    for lm in (recorded, ragged):
        lm.digester = RowDigester(VOCABULARY, torch.device("cpu"))
        lm.wants = OutcomeWants(features=(0, -1))
    backend_choice.use_graphs(recorded, "gathered", graphs)._attend = attend_everything
    return recorded, ragged


def asked(rows: SequenceRows, temperature: float) -> SequenceRows:
    asks = [RowAsk(3, at, temperature) for at in range(len(rows.want))]
    return SequenceRows(rows.table, rows.tokens, rows.parents, rows.want, lambda: asks)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_replays_over_poisoned_memory_give_the_rows_states_and_digests_of_ragged_passes(family: str) -> None:
    graphs = RecordedGraphs()
    recorded, ragged = pair_of_models(family, graphs)
    dice = random.Random(family)
    pairs = [Pair(recorded, ragged, dice) for _ in range(3)]
    for turn in range(14):
        chosen = dice.sample(pairs, dice.randint(1, 3))
        outcomes = []
        for lm, given in zip(
            (recorded, ragged), zip(*(pair.sequences(6) for pair in chosen), strict=True), strict=True
        ):
            asking = [asked(each, 0.8 * (turn % 2)) for each in given]
            outcomes.append(lm.forward(asking))
        ours, theirs = outcomes
        np.testing.assert_allclose(ours.rows(), theirs.rows(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours.features, theirs.features, rtol=1e-5, atol=1e-5)
        for row in range(len(ours)):
            assert ours.digest(row).highest()[0] == theirs.digest(row).highest()[0]
        for pair in chosen:
            pair.commit(dice)
    assert graphs.captured < 14 + len(pairs), "some steps were replays"


def test_a_size_captured_between_two_replays_of_another_spoils_neither() -> None:
    graphs = RecordedGraphs()
    recorded, ragged = pair_of_models("llama", graphs)
    tables = {lm: lm.table() for lm in (recorded, ragged)}

    def logits(count: int) -> list[torch.Tensor]:
        found = []
        for lm, table in tables.items():
            rows = [SequenceRows(table, [count] * count, [-1] * count, range(count))]
            found.append(logits_of(lm, rows))
            table.commit([count - 1])
        return found

    captured = []
    for count in (3, 3, 7, 3, 7, 15, 3, 7, 15):
        torch.testing.assert_close(*logits(count), rtol=1e-5, atol=1e-5)
        assert recorded.steps is not None
        captured.append(len(recorded.steps.shapes))
    assert captured == [1, 1, 2, 2, 2, 3, 3, 3, 3]


def test_a_result_kept_from_inside_a_capture_would_be_found() -> None:
    graphs = RecordedGraphs()
    recorded, _ = pair_of_models("llama", graphs)
    own = recorded.run_on_device
    kept: list[torch.Tensor] = []

    def keeping(*given: object) -> torch.Tensor:
        kept.append(own(*given))  # type: ignore[arg-type]
        return kept[-1]

    assert recorded.steps is not None
    recorded.steps._run = keeping  # type: ignore[assignment]
    table = recorded.table()
    outcome = recorded.forward([SequenceRows(table, [1, 2], [-1, -1], [0, 1])])

    assert np.isfinite(outcome.rows()).all()
    assert kept[-1].isnan().all()
