"""Keys and values in int8: what a slot holds and costs, that a row has one set of bits, steps as on a GPU."""

import itertools
import random
from dataclasses import replace

import pytest
import torch

from outrider.lm.device.memory import first_pool
from outrider.lm.graphs import backend_choice
from outrider.lm.graphs.capture import eager
from outrider.lm.kv.blocks import BLOCK
from outrider.lm.kv.int8_plane import quantise, storage_of
from outrider.lm.kv.pool import KVLayout, SlotPool
from outrider.lm.load.check import Trial
from outrider.lm.load.int8_kv import keep_in_int8
from outrider.lm.runner import PackedLM
from speculative.errors import ModelRefused
from tests.gpu.recorded_graphs import RecordedGraphs
from tests.lm.families import logits_of, model_of, twin_of
from tests.lm.test_deterministic import differing_rows, packed
from tests.lm.test_graphs import Pair, attend_everything, logits_of_both

LAYOUT = KVLayout(((2, 8), (2, 8), (1, 4), (1, 4)), torch.float32, torch.device("cpu"), guests=2, int8=True)


def pool(blocks: int = 8) -> SlotPool:
    return SlotPool(LAYOUT, blocks * BLOCK, initial_slots=BLOCK)


def rows(count: int, seed: int) -> torch.Tensor:
    return torch.randn(1, 2, count, 8, generator=torch.Generator().manual_seed(seed))


def test_a_row_comes_back_within_half_a_step_of_its_largest_number() -> None:
    given = rows(50, 0) * torch.logspace(-20, 20, 50)[:, None]
    codes, scales = quantise(given)
    assert codes.dtype is torch.int8
    error = (codes * scales - given).abs()
    assert (error <= given.abs().amax(-1, keepdim=True) / 127 * 0.5001).all()


def test_a_row_of_zeros_stays_one() -> None:
    codes, scales = quantise(torch.zeros(1, 2, 3, 8))
    assert not (codes * scales).any()


def test_a_row_does_not_depend_on_those_that_are_written_beside_it() -> None:
    given = rows(20, 1)
    alone = quantise(given[:, :, 7:8])
    together = quantise(given)
    assert torch.equal(alone[0], together[0][:, :, 7:8])
    assert torch.equal(alone[1], together[1][:, :, 7:8])


@torch.inference_mode()
def test_rows_survive_growth_and_copies_and_are_read_over_several_runs() -> None:
    slots = pool()
    table, between, behind = slots.table(), slots.table(), slots.table()
    table.reserve(BLOCK)
    given = rows(2 * BLOCK, 2)
    slots.views(0, BLOCK)[0].copy_(given[:, :, :BLOCK])
    slots.planes()[3][:, :BLOCK] = 0.5
    between.reserve(BLOCK)
    table.reserve(2 * BLOCK)
    assert len(table.runs(0, 2 * BLOCK)) == 2
    there = torch.tensor(table.slots(BLOCK, 2 * BLOCK))
    slots.planes()[0].index_copy_(1, there, given[0, :, BLOCK:])
    codes, scales = quantise(given)
    assert torch.equal(slots.seen(table.runs(0, 2 * BLOCK))[0], codes * scales)
    table.length = 2 * BLOCK
    behind.copy_of(table.blocks)
    seen = slots.seen(behind.runs(0, 2 * BLOCK))
    assert torch.equal(seen[0], codes * scales)
    assert torch.equal(seen[3][:, :, :BLOCK], torch.full((1, 1, BLOCK, 4), 0.5)), "guests keep floats"
    for held in (table, between, behind):
        held.close()
    slots.check_integrity()


def test_a_slot_costs_a_byte_a_number_and_four_a_scale() -> None:
    model, guests = 2 * 2 * (8 + 4), 2 * 4 * 4
    assert LAYOUT.slot_bytes == model + guests
    assert replace(LAYOUT, int8=False).slot_bytes == 2 * 2 * 8 * 4 + guests


def test_passes_over_int8_have_a_class_of_their_own() -> None:
    assert pool().numerics == "eager int8"
    assert SlotPool(replace(LAYOUT, int8=False), BLOCK).numerics == "eager"


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_rows_have_the_same_bits_in_random_packings_over_int8(family: str) -> None:
    lm = packed(family, "float32")
    lm.pool = first_pool(replace(lm.pool.layout, int8=True), 16)
    differing, count = differing_rows(lm, random.Random(family).randrange(9))
    assert count > 5
    assert differing == 0
    lm.pool.check_integrity()


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "deepseek_v3"])
def test_static_steps_over_int8_give_the_logits_of_ragged_passes_over_int8(family: str) -> None:
    model = model_of(family)
    static, ragged = PackedLM(twin_of(model)), PackedLM(model)
    for lm in (static, ragged):
        keep_in_int8(lm, None, 16)
    backend_choice.use_graphs(static, "gathered")
    assert static.pool.layout.int8
    assert static.numerics.endswith("int8-kv")
    for found, expected in logits_of_both(static, ragged, random.Random(family), 6):
        # Where the last bits of a number decide between two codes, a row may differ by one step of its scale.
        assert (found - expected).norm() / expected.norm() < 5e-3
    assert static.steps is not None
    assert len(static.steps.shapes) > 1


def test_replays_over_int8_read_nothing_that_an_earlier_replay_left() -> None:
    graphs = RecordedGraphs()
    model = model_of("llama", num_hidden_layers=2)
    recorded, ragged = PackedLM(twin_of(model)), PackedLM(model)
    for lm in (recorded, ragged):
        keep_in_int8(lm, None, 16)
    backend_choice.use_graphs(recorded, "gathered", graphs)._attend = attend_everything
    dice = random.Random(4)
    pair = Pair(recorded, ragged, dice)
    for _ in range(10):
        ours, theirs = pair.sequences(6)
        found, expected = logits_of(recorded, [ours]), logits_of(ragged, [theirs])
        assert (found - expected).norm() / expected.norm() < 5e-3
        pair.commit(dice)
    assert graphs.captured < 10


def other_scales(plane: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Writes rows of int8 with scales that are not theirs."""
    plane.index_copy_(1, slots, rows)
    if rows.shape[0]:
        storage_of(plane)[1].mul_(1.5)


def test_steps_that_write_int8_wrongly_differ_from_ragged_passes_over_int8() -> None:
    lm = PackedLM(model_of("llama"))
    trial = keep_in_int8(lm, Trial.of(lm), 16)
    assert trial is not None
    steps = backend_choice.use_graphs(lm, "gathered")
    trial.verify(lm)
    steps._write = other_scales
    with pytest.raises(ModelRefused, match=r"differs from ragged passes over int8|that are not finite"):
        trial.verify(lm)
    assert lm.pool.used_slots == 0


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *itertools.product(("llama", "qwen3"), (torch.float32, torch.float16, torch.bfloat16)),
        # A code that flips may send a row to other experts.
        *itertools.product(("gpt_oss",), (torch.float32, torch.float16)),
    ],
)
def test_steps_over_int8_are_accepted_in_every_dtype(family: str, dtype: torch.dtype) -> None:
    lm = PackedLM(model_of(family).to(dtype))
    trial = keep_in_int8(lm, lm.first_trial(), 16)
    assert trial is not None
    assert 0.0 < trial.room.row < 0.41
    backend_choice.require_graphs(lm, trial, "gathered", eager)
    assert lm.steps is not None


def test_where_steps_over_int8_fail_passes_stay_ragged(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = PackedLM(model_of("llama"))
    trial = keep_in_int8(lm, Trial.of(lm), 16)
    monkeypatch.setattr(backend_choice, "write_indexed", other_scales)
    backend_choice.compare_backends(lm, trial, "gathered", eager)
    assert lm.steps is None


def test_int8_of_a_size_holds_as_many_more_tokens_as_its_slots_are_smaller() -> None:
    lm = PackedLM(model_of("llama"), kv_mb=2)
    floats = lm.pool.max_slots
    keep_in_int8(lm, None, 2)
    block = BLOCK * lm.pool.layout.slot_bytes
    assert 2 * 2**20 - block < lm.pool.max_slots * lm.pool.layout.slot_bytes <= 2 * 2**20
    assert lm.pool.max_slots > 1.9 * floats
