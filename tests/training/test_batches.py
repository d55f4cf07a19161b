"""Batches are a pure function of the step, and cover the corpus."""

from __future__ import annotations

import numpy as np
import torch

from training.batches import Batches, scattered, shuffled

IDS = np.arange(1000, dtype=np.uint16)


def test_the_same_step_gives_the_same_batch() -> None:
    first, second = (Batches(IDS, window=16, batch=4, seed=1) for _ in range(2))
    for step in (0, 7, 100):
        assert torch.equal(first.at(step), second.at(step))


def test_a_row_is_a_window_and_the_token_after_it() -> None:
    batch = Batches(IDS, window=16, batch=4, seed=1).at(3)
    assert batch.shape == (4, 17)
    assert torch.equal(batch[:, 1:], batch[:, :-1] + 1)


def test_an_epoch_reads_no_token_twice_and_nearly_all_of_them() -> None:
    batches = Batches(IDS, window=16, batch=4, seed=1)
    read = torch.cat([batches.at(step)[:, :-1].flatten() for step in range(15)]).tolist()
    assert len(read) == len(set(read)) == 960


def test_epochs_are_cut_and_shuffled_differently() -> None:
    batches = Batches(IDS, window=16, batch=4, seed=1)
    assert set(batches.at(0)[:, 0].tolist()) != set(batches.at(15)[:, 0].tolist())


def test_rows_come_up_again_only_in_the_next_epoch_and_in_another_order() -> None:
    epochs = [[*shuffled(8, 4, 1, step), *shuffled(8, 4, 1, step + 1)] for step in (0, 2)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(8))] * 2
    assert epochs[0] != epochs[1]


def test_scattered_windows_are_runs_of_the_corpus() -> None:
    rows = scattered(IDS, rows=5, window=16, seed=0)
    assert rows.shape == (5, 16)
    assert (np.diff(rows.astype(int), axis=1) == 1).all()
