"""Threads are chosen from measured passes: the fewest that are about as fast as the best number."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from outrider.lm.autotune import threads as thread_choice
from outrider.lm.autotune.threads import (
    PassThreads,
    ThreadBounds,
    _helped,
    candidates,
    choose_threads,
    measure_helpers,
)
from outrider.lm.kv.table import SlotTable
from outrider.lm.outcome import Outcome
from outrider.lm.plan import SequenceRows
from outrider.lm.runner import PackedLM


@pytest.fixture(autouse=True)
def threads_of_other_tests_stay() -> object:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_powers_of_two_are_compared_below_the_most() -> None:
    assert candidates(1) == [1]
    assert candidates(2) == [2, 1]
    assert candidates(15) == [15, 8, 4, 2, 1]
    assert candidates(16) == [16, 8, 4, 2, 1]


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        ({8: {1: 9.0, 8: 12.0, 64: 20.0}, 1: {1: 3.0, 8: 5.0, 64: 30.0}}, 1),
        ({8: {1: 9.0, 8: 12.0, 64: 20.0}, 1: {1: 50.0, 8: 80.0, 64: 160.0}}, 8),
        ({8: {1: 1.0, 8: 1.0}, 4: {1: 1.05, 8: 1.05}, 2: {1: 1.6, 8: 1.6}, 1: {1: 3.0, 8: 3.0}}, 4),
        ({4: {1: 1.0, 8: 2.0, 64: 9.0}, 1: {1: 1.0, 8: 2.0}}, 1),
    ],
)
def test_the_fewest_threads_that_are_about_as_fast_are_taken(
    times: dict[int, dict[int, float]], chosen: int
) -> None:
    assert choose_threads(times) == chosen


def test_a_model_is_loaded_with_the_threads_that_were_measured(tiny_llama: Path) -> None:
    lm = PackedLM.load(tiny_llama, threads=ThreadBounds(2, 8), check=False)
    assert torch.get_num_threads() in (1, 2)
    assert lm.most_helped == 8
    assert (lm.forward_calls, lm.rows, lm.pool.used_slots) == (0, 0, 0)


def test_threads_that_were_asked_for_are_kept(tiny_llama: Path) -> None:
    lm = PackedLM.load(tiny_llama, threads=2, check=False)
    assert torch.get_num_threads() == 2
    assert lm.most_helped is None


@pytest.mark.parametrize(
    ("alone", "helped", "chosen"),
    [
        # From the first rows that gain.
        ({1: 1.0, 4: 2.0, 64: 9.0}, {1: 1.0, 4: 1.8, 64: 5.0}, PassThreads(2, 4)),
        # A size in between without a gain, as a busy moment gives, does not count against smaller ones.
        ({1: 1.0, 4: 2.0, 16: 4.0, 64: 9.0}, {1: 1.2, 4: 1.5, 16: 4.0, 64: 5.0}, PassThreads(2, 4)),
        # A gain by luck below larger losses is none.
        ({1: 1.0, 4: 2.0, 16: 4.0, 64: 9.0}, {1: 0.9, 4: 2.4, 16: 4.8, 64: 9.1}, PassThreads(2, 65)),
        # Sizes that were not timed may gain.
        ({1: 1.0, 64: 9.0}, {1: 1.0, 64: 9.0}, PassThreads(2, 65)),
        ({1: 1.0}, {1: 1.0}, PassThreads(2, 2)),
        ({1: 9.0, 64: 99.0}, {1: 5.0, 64: 50.0}, PassThreads(2, 1)),
        # A limit of time ended the measurement amid the last size.
        ({1: 1.0, 4: 2.0}, {1: 1.0, 4: 1.2, 64: 9.0}, PassThreads(2, 4)),
    ],
)
def test_threads_help_from_the_rows_on_whose_passes_they_speed_up(
    alone: dict[int, float], helped: dict[int, float], chosen: PassThreads
) -> None:
    assert PassThreads.chosen({2: helped, 1: alone}, 2) == chosen


def test_passes_of_few_rows_are_computed_by_one_thread() -> None:
    assert [PassThreads(8, 4).of(rows) for rows in (1, 3, 4, 64)] == [1, 1, 8, 8]
    assert PassThreads().of(1) == 0


class Clock:
    """A clock that goes when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Passes:
    """Passes of a model that move the test's clock on by a time that depends on the threads alone."""

    passes = "compiled"

    def __init__(self, lm: PackedLM, clock: Clock, seconds: dict[int, float]) -> None:
        self._lm = lm
        self._clock = clock
        self.pool, self.max_length = lm.pool, lm.max_length
        self._seconds = seconds
        self.threads = PassThreads()

    def use_threads(self, threads: PassThreads) -> None:
        self.threads = threads

    def table(self) -> SlotTable:
        return self._lm.table()

    def release(self, table: SlotTable) -> None:
        self._lm.release(table)

    def forward(self, sequences: Sequence[SequenceRows]) -> Outcome:
        self._clock.now += self._seconds[self.threads.of(len(sequences[0].tokens))]
        return self._lm.forward(sequences)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(thread_choice, "time", clock)
    return clock


@pytest.fixture
def tiny(tiny_llama: Path) -> PackedLM:
    return PackedLM.load(tiny_llama, check=False)


def test_helped_passes_are_measured_and_run_with_the_choice(tiny: PackedLM, clock: Clock) -> None:
    passes = Passes(tiny, clock, {4: 0.002, 2: 0.002, 1: 0.006})

    assert measure_helpers(passes, 4) == PassThreads(2, 1) == passes.threads


def test_threads_that_help_large_passes_alone_are_chosen() -> None:
    alone = {1: 1.0, 2: 1.0, 4: 1.0, 8: 1.05, 16: 1.2, 64: 1.35}
    assert _helped({2: dict.fromkeys(alone, 1.0), 1: alone}) == 2
    assert _helped({2: dict.fromkeys(alone, 1.0), 1: dict.fromkeys(alone, 1.02)}) == 1


def test_with_a_given_number_only_the_rows_are_measured(tiny: PackedLM, clock: Clock) -> None:
    torch.set_num_threads(3)
    assert measure_helpers(Passes(tiny, clock, {3: 0.002, 1: 0.006}), None) == PassThreads(3, 1)
    held_up = measure_helpers(Passes(tiny, clock, {3: 0.004, 1: 0.003}), None)
    assert held_up == PassThreads(3, 65)
    torch.set_num_threads(1)
    assert measure_helpers(Passes(tiny, clock, {}), None) == PassThreads(1)


def test_a_large_model_is_helped_by_all_threads(tiny: PackedLM, clock: Clock) -> None:
    passes = Passes(tiny, clock, {4: 0.02, 1: 0.02})

    assert measure_helpers(passes, 4) == PassThreads(4, 1)
