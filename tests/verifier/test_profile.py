"""What is measured of a target at load, on a clock of its own."""

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from ngram_lm import NgramLM, NgramOutcome

from outrider.lm import step_profile
from outrider.lm.plan import SequenceRows
from outrider.lm.step_profile import profile_steps
from verifier_service.engine.step_cost import StepCostModel


class Clocked(NgramLM):
    """Its passes take 5 ms, a quarter more per row, and 2 us for each row and position that it attends to."""

    def __init__(self, slower: float = 1.0, max_length: int = 4096) -> None:
        super().__init__(max_length=max_length)
        self.now_ms = 0.0
        self.slower = slower

    def took_ms(self, rows: int, depth: float) -> float:
        return self.slower * (5.0 + 0.25 * rows + 0.002 * rows * depth)

    def forward(self, sequences: Sequence[SequenceRows]) -> NgramOutcome:
        self.now_ms += sum(
            self.took_ms(len(sequence.tokens), sequence.table.length) for sequence in sequences
        )
        return super().forward(sequences)


def measured(target: Clocked, patch: pytest.MonkeyPatch) -> StepCostModel:
    patch.setattr(step_profile, "time", SimpleNamespace(perf_counter=lambda: target.now_ms / 1000))
    costs = StepCostModel.of(profile_steps(target))  # type: ignore[arg-type]
    assert target.pool.used_slots == 0
    return costs


@pytest.mark.parametrize("rows", [1, 16, 64, 256, 500])
@pytest.mark.parametrize("depth", [64, 500, 3000])
def test_a_step_is_expected_to_take_what_its_rows_and_their_past_take(
    rows: int, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Clocked()
    costs = measured(target, monkeypatch)
    assert costs.expected_ms(rows, depth=depth) == pytest.approx(target.took_ms(rows, depth), rel=0.02)


def test_a_target_of_few_positions_is_measured_as_far_as_they_go(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Clocked(max_length=40)
    costs = measured(target, monkeypatch)
    assert costs.expected_ms(4, depth=20) == pytest.approx(target.took_ms(4, 20), rel=0.02)


def test_a_slow_target_is_not_measured_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Clocked(slower=100.0)
    costs = measured(target, monkeypatch)
    assert target.now_ms < 20_000, "of which the short past of four sessions takes half"
    assert costs.expected_ms(1) == pytest.approx(target.took_ms(1, 64), rel=0.02)
    assert costs.expected_ms(64, depth=1000) == costs.expected_ms(64)
