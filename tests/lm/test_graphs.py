"""Steps of static shape against ragged passes, and what they ask of a device."""

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from outrider.lm import transfer
from outrider.lm.attention.interface import AttentionParams
from outrider.lm.attention.metadata import AttentionMetadata
from outrider.lm.attention.shapes import BUCKETS
from outrider.lm.device.digest import RowDigester
from outrider.lm.device.placement import GpuOptions
from outrider.lm.graphs import backend_choice
from outrider.lm.graphs.capture import Run, eager
from outrider.lm.kv.blocks import BLOCK
from outrider.lm.kv.pool import KVLayout, SlotPool
from outrider.lm.kv.table import SlotTable
from outrider.lm.plan import SequenceRows
from outrider.lm.runner import PackedLM
from speculative.digest import RowAsk
from speculative.errors import ModelRefused
from tests.lm.families import LENGTH, VOCABULARY, logits_of, model_of, twin_of
from tests.lm.test_runner import Driven, in_pieces, way

FAMILIES = ["llama", "mistral", "gemma2", "gpt_oss", "deepseek_v3", "gpt2"]
"""Plain; windows; capped scores; sinks; values narrower than keys; positions that are embedded."""


def both_ways(family: str) -> tuple[PackedLM, PackedLM]:
    """One model twice: with static shapes, and ragged."""
    model = model_of(family)
    static, ragged = PackedLM(twin_of(model)), PackedLM(model)
    backend_choice.use_graphs(static, "gathered")
    return static, ragged


class Pair:
    """One random session in two models at once; in the first, its blocks lie apart from one another."""

    def __init__(self, static: PackedLM, ragged: PackedLM, dice: random.Random) -> None:
        prompt = [dice.randrange(VOCABULARY) for _ in range(2 * BLOCK + 3)]
        self.driven = Driven(static, dice)
        self.driven.table, _ = in_pieces(static, prompt)
        self.other = ragged.table()
        ragged.forward([SequenceRows(self.other, prompt, range(-1, len(prompt) - 1), ())])
        self.other.commit(range(len(prompt)))

    def sequences(self, most: int) -> tuple[SequenceRows, SequenceRows]:
        sequence, _ = self.driven.sequence_rows(most)
        every = range(len(sequence.tokens))
        return tuple(SequenceRows(table, sequence.tokens, sequence.parents, every) for table in self.tables)  # type: ignore[return-value]

    @property
    def tables(self) -> tuple[SlotTable, SlotTable]:
        return self.driven.table, self.other

    def commit(self, dice: random.Random) -> None:
        if self.other.nodes:
            path = way(self.other.parents, dice.randrange(self.other.nodes))
            for table in self.tables:
                table.commit(path)


def logits_of_both(
    static: PackedLM, ragged: PackedLM, dice: random.Random, passes: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Logits of passes over random sessions, by static steps and by ragged passes."""
    pairs = [Pair(static, ragged, dice) for _ in range(4)]
    for _ in range(passes):
        chosen = dice.sample(pairs, dice.randint(1, len(pairs)))
        ours, theirs = zip(*(pair.sequences(7) for pair in chosen), strict=True)
        yield logits_of(static, ours), logits_of(ragged, theirs)
        for pair in chosen:
            pair.commit(dice)


@pytest.mark.parametrize("family", FAMILIES)
def test_static_steps_give_the_logits_of_ragged_passes(family: str) -> None:
    static, ragged = both_ways(family)
    for found, expected in logits_of_both(static, ragged, random.Random(family), 8):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(found.argmax(dim=1), expected.argmax(dim=1))
    assert static.steps is not None
    assert len(static.steps.shapes) > 2


def test_a_pass_of_more_rows_than_the_largest_size_goes_the_ragged_way() -> None:
    lm = PackedLM(model_of("llama", num_hidden_layers=1))
    runner = backend_choice.use_graphs(lm, "gathered")
    runner._attend = no_attention
    tables = [lm.table() for _ in range(BUCKETS[-1] // 64)]
    sequences = [SequenceRows(table, [1] * 64, [-1] * 64, ()) for table in tables]
    lm.forward(sequences)
    assert [shape.rows for shape in runner.shapes] == [BUCKETS[-1]]

    tables += [lm.table()]
    lm.forward([SequenceRows(table, [1], [-1], ()) for table in tables])
    lm.forward([SequenceRows(table, [1] * 64, [-1] * 64, ()) for table in tables])

    assert [shape.rows for shape in runner.shapes] == [BUCKETS[-1], 72]


def test_a_session_with_more_branching_nodes_than_a_mask_has_bits_goes_the_ragged_way() -> None:
    static = PackedLM(model_of("llama", max_position_embeddings=1024))
    runner = backend_choice.use_graphs(static, "gathered")
    table = static.table()
    static.forward([SequenceRows(table, [1] * 256, [-1] * 256, ())])
    shapes = runner.shapes

    assert logits_of(static, [SequenceRows(table, [2], [255], [0])]).isfinite().all()
    assert table.nodes == 257
    assert runner.shapes == shapes


def test_a_prompts_chunk_of_any_size_is_a_step_also_beside_trees_and_with_a_tree_of_its_own() -> None:
    model = model_of("mistral", max_position_embeddings=2048)
    static, ragged = PackedLM(twin_of(model)), PackedLM(model)
    backend_choice.use_graphs(static, "gathered")
    ragged_passes: list[int] = []
    static._run_ragged = lambda *_: ragged_passes.append(1)  # type: ignore[assignment, method-assign]
    dice = random.Random(5)
    chunk = [dice.randrange(VOCABULARY) for _ in range(700)]
    # A pending row with a tree of 256 nodes is the most that a request may ask for.
    tree = [-1, *(dice.randrange(row) for row in range(1, 257))]
    tail = [-1, *range(300), *(dice.randrange(300, 301 + row) for row in range(8))]
    found = []
    for lm in (static, ragged):
        first, second, third = (lm.table() for _ in range(3))
        lm.forward([SequenceRows(first, chunk, range(-1, 699), ())])
        first.commit(range(700))
        sequences = [
            SequenceRows(first, chunk[:600], range(-1, 599), [0, 599]),
            SequenceRows(second, chunk[:257], tree, range(257)),
            SequenceRows(third, chunk[: len(tail)], tail, range(290, len(tail))),
        ]
        found.append(logits_of(lm, sequences))

    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)
    assert not ragged_passes


def test_once_all_sizes_are_captured_no_step_captures_another_however_few_there_was_time_for() -> None:
    model = model_of("llama", num_hidden_layers=1)
    lm, plain = PackedLM(twin_of(model)), PackedLM(model)
    lm.gpu = GpuOptions(max_rows=320)
    captured: list[Run] = []

    def capture(run: Run) -> Run:
        captured.append(run)
        return run

    runner = backend_choice.use_graphs(lm, "gathered", capture)
    seconds = itertools.count(step=10.0)
    runner.capture_all(100.0, lambda: next(seconds))
    few = {shape.rows for shape in runner.shapes}
    assert few >= {1, 4, 16, 64, 256, 320}
    assert runner.shapes[0].rows == 320
    assert few < set(BUCKETS)
    before = len(captured)
    dice = random.Random(2)
    for rows in (1, 2, 5, 17, 70, 130, 300):
        tree = [dice.randrange(-1, row) for row in range(rows)]
        own, other = lm.table(), plain.table()
        found, expected = (
            logits_of(each, [SequenceRows(table, [3] * rows, tree, range(rows))])
            for each, table in ((lm, own), (plain, other))
        )
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        lm.release(own)
    assert len(captured) == before


def test_a_device_without_memory_for_the_largest_step_refuses_the_model_by_name() -> None:
    lm = PackedLM(model_of("llama", num_hidden_layers=1))

    def full(run: Run) -> Run:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")

    backend_choice.use_graphs(lm, "gathered", full)
    with pytest.raises(ModelRefused, match=f"llama .* a step of {BUCKETS[-1]} rows; give it less kv_mb"):
        lm.capture_steps()


class Operations(TorchDispatchMode):
    """Names of the operations that torch was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def no_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    metadata: AttentionMetadata,
    params: AttentionParams,
) -> torch.Tensor:
    """Stands in for the kernel, which is one operation or two."""
    return query.new_zeros(*query.shape[:2], values.shape[2])


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Copies between host and device, in order."""
    seen: list[str] = []
    for name in ("upload", "download", "sent"):
        own = getattr(transfer, name)
        monkeypatch.setattr(
            transfer, name, lambda *given, own=own, name=name: (seen.append(name), own(*given))[1]
        )
    return seen


def operations_of_a_step(lm: PackedLM, sessions: int, rows: int, ask: RowAsk) -> list[str]:
    """What torch is asked for in the second step of its size, and in the commits after it."""
    tables = [lm.table() for _ in range(sessions)]
    for _ in range(2):
        with Operations() as asked:
            lm.forward(
                [
                    SequenceRows(table, [1] * rows, [-1] * rows, [0, rows - 1], lambda: [ask] * 2)
                    for table in tables
                ]
            )
            for table in tables:
                table.commit([rows - 1])
    for table in tables:
        lm.release(table)
    return asked.names


ASKS = {
    "greedy": (RowAsk(), ["upload", "download"]),
    "penalised": (RowAsk(named=(3, 5)), ["upload", "upload", "download"]),
    "sampled": (RowAsk(7, 40, 0.8), ["upload", "upload", "download"]),
}
"""What the host asks of each row, and the copies of such a step."""


@pytest.mark.parametrize("asked", ASKS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_of_many_sessions_asks_a_device_for_no_more_than_a_step_of_one(
    family: str, asked: str, copies: list[str]
) -> None:
    ask, expected = ASKS[asked]
    lm = PackedLM(model_of(family))
    lm.digester = RowDigester(VOCABULARY, torch.device("cpu"))
    runner = backend_choice.use_graphs(lm, "gathered")
    runner._attend = no_attention
    copies.clear()

    one = operations_of_a_step(lm, 1, 16, ask)
    alone = list(copies)
    copies.clear()
    many = operations_of_a_step(lm, 8, 2, ask)

    assert one == many
    assert alone == copies == expected * 2
    host_reads = {"aten._local_scalar_dense.default", "aten.nonzero.default", "aten.item.default"}
    assert not host_reads & set(many)


def test_commits_put_their_copies_off_to_the_next_pass() -> None:
    lm = PackedLM(model_of("llama"))
    backend_choice.use_graphs(lm, "gathered")
    table = lm.table()
    lm.forward([SequenceRows(table, [1, 2, 3], [-1, -1, 1], ())])

    with Operations() as asked:
        table.commit([1, 2])
    assert asked.names == []
    assert len(lm.pool.deferred or ()) == 2

    lm.forward([SequenceRows(table, [4], [-1], ())])
    assert not lm.pool.deferred


def test_copies_put_off_come_to_the_same_as_copies_made_at_once() -> None:
    layout = KVLayout(((2, 4), (2, 6)), torch.float32, torch.device("cpu"))
    dice = random.Random(3)
    at_once, later = (SlotPool(layout, 8 * BLOCK, 8 * BLOCK) for _ in range(2))
    later.deferred = {}
    with torch.inference_mode():
        for plane, other in zip(at_once.planes(), later.planes(), strict=True):
            plane.copy_(torch.randn_like(plane))
            other.copy_(plane)
    for turn in range(60):
        count = dice.randrange(1, 12)
        sources = [dice.randrange(at_once.slots) for _ in range(count)]
        targets = dice.sample(range(at_once.slots), count)
        at_once.copy(sources, targets)
        later.copy(sources, targets)
        if turn % 7 == 6:
            later.settle()
            for plane, other in zip(at_once.planes(), later.planes(), strict=True):
                assert torch.equal(plane[:, : at_once.slots], other[:, : at_once.slots])


class OutOfMemory(TorchDispatchMode):
    """Lets so many selections of slots have memory, and no further one."""

    def __init__(self, left: int) -> None:
        super().__init__()
        self.left = left

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.index_select.default:
            if not self.left:
                raise torch.OutOfMemoryError("a test")
            self.left -= 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("selections", [0, 1])
def test_copies_put_off_are_made_later_where_memory_ends_amid_them(selections: int) -> None:
    layout = KVLayout(((2, 4), (2, 6)), torch.float32, torch.device("cpu"))
    pool = SlotPool(layout, BLOCK, BLOCK)
    pool.deferred = {}
    with torch.inference_mode():
        for plane in pool.planes():
            plane.copy_(torch.randn_like(plane))
    before = [plane.clone() for plane in pool.planes()]
    pool.copy([3, 5], [1, 3])
    with OutOfMemory(selections), pytest.raises(torch.OutOfMemoryError):
        pool.settle()
    assert all(torch.equal(*pair) for pair in zip(pool.planes(), before, strict=True))

    pool.settle()
    for plane, old in zip(pool.planes(), before, strict=True):
        assert torch.equal(plane[:, [1, 3]], old[:, [3, 5]])
    assert not pool.deferred


def test_a_step_is_captured_once_per_size_and_again_where_its_slots_have_moved() -> None:
    lm = PackedLM(model_of("llama", max_position_embeddings=4096), kv_mb=2)
    captured: list[Run] = []

    def capture(run: Run) -> Run:
        captured.append(run)
        return eager(run)

    backend_choice.use_graphs(lm, "gathered", capture)
    table = lm.table()
    for _ in range(3):
        lm.forward([SequenceRows(table, [1], [-1], [0])])
        table.commit([0])
    assert len(captured) == 1
    before = lm.pool.slots
    other = lm.table(reserve=before)
    assert lm.pool.slots > before

    lm.forward([SequenceRows(table, [1], [-1], [0])])

    assert len(captured) == 2
    for each in (table, other):
        lm.release(each)


def attend_everything(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    metadata: AttentionMetadata,
    params: AttentionParams,
) -> torch.Tensor:
    """Attention as one fixed sequence of operations, whatever the step holds: all positions there may be."""
    groups = query.shape[1] // keys.shape[0]
    at = torch.arange(LENGTH + BLOCK)
    tile = metadata.row_tile.long().clamp_min(0)
    table, base = metadata.tiles[tile, 2].long(), metadata.tiles[tile, 3].long()
    page = metadata.tables[(table[:, None] + at // BLOCK).clamp_max(len(metadata.tables) - 1)].long()
    slots = (page * BLOCK + at % BLOCK).clamp(0, keys.shape[1] - 1)
    node = (at[None] - base[:, None]).clamp(0, 255)
    bits = (metadata.masks.gather(1, node // 32) >> (node % 32)) & 1
    trunk = (at >= metadata.first[:, None]) & (at < metadata.upto[:, None])
    allowed = torch.where(at < base[:, None], trunk, bits == 1)
    chosen, mixed = (
        plane.index_select(1, slots.flatten())
        .unflatten(1, slots.shape)
        .permute(1, 0, 2, 3)
        .repeat_interleave(groups, dim=1)
        for plane in (keys, values)
    )
    scores = torch.einsum("rhd,rhsd->rhs", query, chosen) * (params.scaling or query.shape[2] ** -0.5)
    weights = torch.softmax(scores.masked_fill(~allowed[:, None], -1e30), dim=-1)
    # Nothing says what lies where nobody may look; zero times that need not be zero.
    mixed = mixed.masked_fill(~allowed[:, None, :, None], 0.0)
    return torch.einsum("rhs,rhsd->rhd", weights, mixed)


@pytest.mark.slow
def test_a_recorded_step_replays_other_steps_of_its_size() -> None:
    """As a CUDA graph does: operations and addresses are those of the first step of the size."""
    model = model_of("mistral", num_hidden_layers=2)
    static, ragged = PackedLM(twin_of(model)), PackedLM(model)

    def record(run: Run) -> Run:
        run()

        def whole() -> torch.Tensor:
            run()
            return runner._logits

        replay = make_fx(whole)()
        recorded.append(replay)
        return replay

    recorded: list[Callable[[], torch.Tensor]] = []
    runner = backend_choice.use_graphs(static, "gathered", record)
    runner._attend = attend_everything
    dice = random.Random(9)
    pairs = [Pair(static, ragged, dice) for _ in range(3)]
    for turn in range(12):
        chosen = dice.sample(pairs, dice.randint(1, 3))
        ours, theirs = zip(*(pair.sequences(6) for pair in chosen), strict=True)
        torch.testing.assert_close(logits_of(static, ours), logits_of(ragged, theirs), rtol=1e-5, atol=1e-5)
        for pair in chosen:
            pair.commit(dice)
        assert turn < 6 or len(recorded) < turn


def test_going_back_to_ragged_passes_makes_the_copies_that_were_put_off() -> None:
    static, ragged = both_ways("llama")
    tables = static.table(), ragged.table()
    for lm, table in zip((static, ragged), tables, strict=True):
        lm.forward([SequenceRows(table, [1, 2, 3], [-1, -1, 1], ())])
        table.commit([1, 2])
    backend_choice.use_ragged(static)

    found, expected = (
        logits_of(lm, [SequenceRows(table, [4], [-1], [0])])
        for lm, table in zip((static, ragged), tables, strict=True)
    )

    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
