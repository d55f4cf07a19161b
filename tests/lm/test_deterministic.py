"""The deterministic profile: one row, one set of bits, however the pass that computes it is packed."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from outrider.lm.deterministic import attention, plan, profile
from outrider.lm.deterministic.kernel import TILE
from outrider.lm.deterministic.linear import TiledProduct
from outrider.lm.deterministic.profile import Deterministic
from outrider.lm.kv.blocks import BLOCK
from outrider.lm.kv.table import SlotTable
from outrider.lm.load.check import Trial
from outrider.lm.plan import SequenceRows
from outrider.lm.runner import PackedLM
from speculative.errors import InvalidRequest, ModelRefused
from tests.lm.families import VOCABULARY, check_pass, logits_of, model_of
from tests.lm.test_runner import Driven

LONG = 600
FAMILIES = ["llama", "mistral", "gemma2", "gemma3_text", "qwen3", "gpt_neox", "gpt2"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Without instructions for it, bfloat16 takes many times as long.
SLOW_BFLOAT16 = ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)]


def packed(family: str, dtype: str, *, profile: bool = True, **changes: object) -> PackedLM:
    length = {"n_positions": LONG} if family == "gpt2" else {}
    model = model_of(family, **{"max_position_embeddings": LONG, **length, **changes})
    lm = PackedLM(model.to(DTYPES[dtype]), profile=Deterministic() if profile else None)
    if profile or dtype == "float32":
        lm.pack()
    return lm


def chain(lm: PackedLM, table: SlotTable, ids: Sequence[int]) -> torch.Tensor:
    logits = logits_of(lm, [SequenceRows(table, ids, range(-1, len(ids) - 1), range(len(ids)))])
    table.commit(range(len(ids)))
    return logits


def whole(lm: PackedLM, ids: Sequence[int]) -> torch.Tensor:
    """Logits after every id, alone and in one pass."""
    table = lm.table()
    logits = chain(lm, table, ids)
    lm.release(table)
    return logits


def differing_rows(lm: PackedLM, seed: int, turns: int = 7) -> tuple[int, int]:
    """Number of rows whose bits differ from those of a pass of their own, and number of rows in all.

    The rows are of random sessions, trees, commits and branches.
    """
    dice = random.Random(seed)
    sessions = [Driven(lm, dice) for _ in range(3)]
    for session, size in zip(sessions, (TILE - 12, 2 * TILE - 3, dice.randrange(1, 300)), strict=True):
        session.committed = [dice.randrange(VOCABULARY) for _ in range(size)]
        for low in range(0, size, step := dice.randint(1, size)):
            chain(lm, session.table, session.committed[low : low + step])
    differing = rows = 0
    others: list[list[int]] = []
    for turn in range(turns):
        chosen = dice.sample(sessions, dice.randint(1, len(sessions)))
        sequences, paths = zip(
            *(session.sequence_rows(dice.choice((1, 9, 20))) for session in chosen), strict=True
        )
        found = logits_of(lm, sequences)
        for row, ids in zip(found, [ids for wanted in paths for ids in wanted], strict=True):
            differing += not torch.equal(row, whole(lm, ids)[-1])
            rows += 1
        for session in sessions:
            session.commit()
        if turn == 2:
            sessions.append(dice.choice(sessions).branch())
        # Somebody takes the blocks behind, so that sessions grow in pieces.
        others += [lm.pool.take(1, session.table.blocks[-1]) for session in sessions]
    for session in sessions:
        lm.release(session.table)
    for blocks in others:
        lm.pool.blocks.give(blocks)
    return differing, rows


@pytest.mark.parametrize("dtype", SLOW_BFLOAT16)
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_have_the_same_bits_in_random_packings(family: str, dtype: str) -> None:
    lm = packed(family, dtype)
    differing, rows = differing_rows(lm, seed=FAMILIES.index(family))
    assert rows > 5
    assert differing == 0
    lm.pool.check_integrity()


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_the_profile_the_same_rows_have_other_bits(dtype: str) -> None:
    differing, _ = differing_rows(packed("llama", dtype, profile=False), 0)
    assert differing > 0


@pytest.mark.parametrize("dtype", SLOW_BFLOAT16)
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_row_has_the_same_bits_by_decoding_by_chunks_and_in_one_piece(family: str, dtype: str) -> None:
    lm = packed(family, dtype)
    dice = random.Random(3)
    ids = [dice.randrange(VOCABULARY) for _ in range(9 * TILE + 7)]
    expected = whole(lm, ids)
    for sizes in ((1,), (37,), (200, 1, 64)):
        table = lm.table()
        low = turn = 0
        while low < (len(ids) if sizes != (1,) else TILE + 20):
            part = ids[low : low + sizes[turn % len(sizes)]]
            assert torch.equal(chain(lm, table, part), expected[low : low + len(part)])
            low, turn = low + len(part), turn + 1
        lm.release(table)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_prefix_that_was_adopted_or_copied_changes_no_bit(dtype: str) -> None:
    lm = packed("llama", dtype)
    dice = random.Random(5)
    ids = [dice.randrange(VOCABULARY) for _ in range(2 * TILE + 30)]
    expected = whole(lm, ids)
    full = len(ids) // BLOCK * BLOCK
    source = lm.table()
    for low in range(0, len(ids), 11):
        chain(lm, source, ids[low : low + 11])
    adopted, copied = lm.table(), lm.table()
    adopted.adopt(source.blocks[: full // BLOCK])
    between = lm.pool.take(1, source.blocks[-1])
    copied.copy_of(source.blocks[: full // BLOCK])
    for table in (adopted, copied):
        assert torch.equal(chain(lm, table, ids[full:]), expected[full:])
    more = [*ids, 5, 9]
    again = whole(lm, more)[-2:]
    sequences = [SequenceRows(table, [7, 5, 9], [-1, -1, 1], [1, 2]) for table in (adopted, copied, source)]
    for rows in logits_of(lm, sequences).split(2):
        assert torch.equal(rows, again)
    for table in (source, adopted, copied):
        lm.release(table)
    lm.pool.blocks.give(between)


@pytest.mark.parametrize("family", FAMILIES)
def test_it_computes_what_the_model_does(family: str) -> None:
    model = model_of(family)
    lm = PackedLM(model, profile=Deterministic())
    trial = Trial.of(lm)
    lm.pack()
    trial.verify(lm)
    assert lm.pool.used_slots == 0


def test_keys_and_values_of_half_precision_are_kept_in_float32() -> None:
    assert packed("llama", "bfloat16").pool.layout.dtype is torch.float32


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("gpt_oss", "GptOssTopKRouter multiplies by its `weight` outside linear layers"),
        ("deepseek_v3", "DeepseekV3Experts multiplies by its `gate_up_proj` outside linear layers"),
    ],
)
def test_a_model_that_multiplies_outside_linear_layers_is_refused_by_name(family: str, why: str) -> None:
    with pytest.raises(ModelRefused, match=f"{family} is not served under the deterministic profile: {why}"):
        packed(family, "float32")


def refused(lm: PackedLM) -> None:
    assert isinstance(lm.profile, Deterministic)
    with pytest.raises(ModelRefused, match=r"\d+ of \d+ rows depend on what they are computed with"):
        lm.profile.verify(lm)
    assert lm.pool.used_slots == 0


def test_the_check_finds_linear_layers_that_are_not_tiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TiledProduct, "compute", lambda self, rows: rows @ self.weight().t())
    refused(packed("llama", "float32", hidden_size=256, intermediate_size=720))


def test_the_check_finds_passes_that_leave_vectors_unfilled() -> None:
    lm = packed("gpt_neox", "float32", intermediate_size=49, hidden_act="silu")
    assert isinstance(lm.profile, Deterministic)
    assert lm.profile.multiple == 32
    lm.profile.verify(lm)
    lm.profile.multiple = 1
    refused(lm)


def test_the_check_finds_tiles_that_begin_where_slots_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_order_of_slots(rows: object, block: plan.Block, window: int | None) -> object:
        for tile in gather(rows, block, window):
            yield plan.Gathered(tile.rows, tile.session, tile.tile, tile.slots[::-1], tile.hidden[:, ::-1])

    gather = plan._gather
    monkeypatch.setattr(plan, "_gather", in_order_of_slots)
    lm = packed("llama", "float32")
    check_pass(lm)
    refused(lm)


def test_the_check_finds_groups_of_tiles_that_begin_with_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window's first tile moves with the rows that share the pass."""
    monkeypatch.setattr(attention, "base_tile", lambda first: first)
    lm = packed("mistral", "float32", sliding_window=3 * TILE)
    dice = random.Random(1)
    ids = [dice.randrange(VOCABULARY) for _ in range(9 * TILE)]
    expected = whole(lm, ids)
    table = lm.table()
    chain(lm, table, ids[:-1])
    assert not torch.equal(chain(lm, table, ids[-1:])[0], expected[-1])


def test_two_loads_of_one_model_say_the_same_numerics_and_other_weights_other_ones(
    tiny_llama: Path, tiny_llama_b: Path
) -> None:
    said = [
        PackedLM.load(folder, deterministic=True, dtype=dtype).numerics
        for folder, dtype in (
            (tiny_llama, "float32"),
            (tiny_llama, "float32"),
            (tiny_llama_b, "float32"),
            (tiny_llama, "bfloat16"),
        )
    ]
    assert said[0] == said[1]
    assert len(set(said)) == 3
    assert said[0].startswith("cpu float32 deterministic ")
    assert PackedLM.load(tiny_llama).numerics == "cpu float32"


def test_several_threads_are_refused(tiny_llama: Path) -> None:
    with pytest.raises(InvalidRequest, match="threads = 2: the deterministic profile computes on one thread"):
        PackedLM.load(tiny_llama, deterministic=True, threads=2)
    assert torch.get_num_threads() == 1


def test_a_machine_whose_products_are_not_steady_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = PackedLM(model_of("llama"), profile=Deterministic())
    monkeypatch.setattr(TiledProduct, "multiply", lambda self, rows: (rows @ self.weight().t()).cumsum(0))
    with pytest.raises(ModelRefused, match="a row of a linear layer depends on the rows computed beside it"):
        lm.pack()


def test_the_checks_work_for_a_model_of_few_positions() -> None:
    lm = PackedLM(model_of("llama", max_position_embeddings=20), profile=Deterministic())
    lm.pack()
    assert isinstance(lm.profile, Deterministic)
    lm.profile.verify(lm)
    assert len(profile._draw(lm)[0]) == 18
