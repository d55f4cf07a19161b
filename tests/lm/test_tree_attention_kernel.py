"""The Triton kernel, run by Triton's interpreter on the CPU, against the ragged way of the same rows.

Skipped where Triton is not installed; docs/gpu-checks.md says how to have it here.
"""

import os
import random
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_first.attention_case import random_session
from outrider.lm.attention.interface import AttentionParams, SlotCache
from outrider.lm.attention.kernels.gathered import attend_gathered
from outrider.lm.attention.metadata import Attend, WriteRows
from outrider.lm.attention.shapes import BUCKETS, graph_shape
from outrider.lm.graphs.backend_choice import use_graphs
from outrider.lm.graphs.graph_runner import PagedCache, write_indexed
from outrider.lm.graphs.inputs import GraphInputs
from outrider.lm.kv.blocks import BLOCK
from outrider.lm.kv.int8_plane import storage_of
from outrider.lm.kv.pool import KVLayout, SlotPool
from outrider.lm.plan import PassPlan, SequenceRows
from outrider.lm.runner import PackedLM
from tests.lm.families import VOCABULARY, logits_of, model_of, twin_of

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Case:
    """Heads, widths and lengths of one attention; `trees` are (committed, kept nodes, rows) per session.

    Sessions of more than 60 rows begin with a chain of all but 20.
    """

    trees: tuple[tuple[int, int, int], ...]
    heads: int = 4
    key_heads: int = 2
    width: int = 16
    value_width: int = 16
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    scaling: float | None = None


CASES = {
    "one row": Case(((37, 0, 1),)),
    "the first row of all": Case(((0, 0, 1),)),
    "trees of several lengths": Case(((5, 0, 9), (40, 6, 3), (0, 3, 5), (33, 0, 1))),
    "a prefix in several spans": Case(((700, 5, 6), (310, 0, 1))),
    "a whole mask of nodes": Case(((20, 200, 56),)),
    "a prompt's chunk beside trees": Case(((130, 0, 170), (40, 0, 9), (0, 0, 61))),
    "a prompt's chunk in a window": Case(((60, 0, 150), (10, 0, 3)), window=40),
    "one long past among many short ones": Case((*((9, 0, 1),) * 40, (2100, 0, 3), *((9, 0, 2),) * 30)),
    "a key head of their own": Case(((21, 2, 7),), heads=3, key_heads=3),
    "one key head for all": Case(((21, 2, 7), (9, 0, 2)), heads=6, key_heads=1),
    "groups that are no power of two": Case(((21, 2, 7),), heads=14, key_heads=2, width=24, value_width=40),
    "a window": Case(((60, 9, 9), (4, 0, 6), (300, 2, 2)), window=7),
    "a window in several spans": Case(((900, 3, 4),), window=500),
    "a window within the tree": Case(((30, 12, 20),), window=3),
    "capped scores": Case(((30, 4, 5), (200, 0, 1)), softcap=1.5, scaling=0.7),
    "sinks": Case(((30, 4, 5), (300, 0, 2)), sinks=True),
    "sinks, a cap and a window": Case(((30, 4, 5), (300, 0, 2)), sinks=True, softcap=2.0, window=150),
}


class Attention:
    """One layer's slots with random contents, in blocks that lie apart, and a pass over them."""

    def __init__(self, case: Case, dtype: torch.dtype, seed: int, int8: bool = False) -> None:
        self.case, self.dtype = case, dtype
        self._dice = random.Random(seed)
        self._random = torch.Generator().manual_seed(seed)
        shapes = ((case.key_heads, case.width), (case.key_heads, case.value_width))
        slots = 4 * sum(sum(tree) + 2 * BLOCK for tree in case.trees)
        self.pool = SlotPool(KVLayout(shapes, dtype, torch.device("cpu"), int8=int8), slots, slots)
        with torch.inference_mode():
            for plane in self.pool.planes():
                # What nobody may see is not a number.
                storage_of(plane)[1].fill_(float("nan"))
            sequences = [self._session(*tree) for tree in case.trees]
            self.plan = PassPlan(sequences, self.pool, dtype)
        sinks = self._draw(case.heads) if case.sinks else None
        self.params = AttentionParams(case.scaling, case.window, case.softcap, sinks)
        rows = self.plan.row_count
        self.query = self._draw(1, case.heads, rows, case.width)
        self.keys = self._draw(1, case.key_heads, rows, case.width)
        self.values = self._draw(1, case.key_heads, rows, case.value_width)

    def _draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._random).to(self.dtype)

    def _session(self, committed: int, kept: int, rows: int) -> SequenceRows:
        chain = kept + rows - 20 if rows > 60 else 0
        return random_session(self.pool, self._dice, self._draw, (committed, kept, rows), chain=chain)

    def ragged(self) -> torch.Tensor:
        """`[rows, heads, value width]` by the way that the CPU takes."""
        cache = SlotCache("test", self.pool, self.plan)
        return cache.compute(self.query, self.keys, self.values, self.params, 0)[0]

    def static(self, attend: Attend, write: WriteRows = write_indexed) -> torch.Tensor:
        """The same as a step of static shape, its padding included."""
        windows = () if self.case.window is None else (self.case.window,)
        inputs = GraphInputs(BUCKETS[-1], windows, 4096, torch.device("cpu"))
        shape = graph_shape(self.plan.rows, 0, self.case.heads // self.case.key_heads)
        inputs.fill(self.plan, shape, [0] * self.plan.row_count, [], self.pool.scratch)
        inputs.send({})
        padding = (0, 0, 0, shape.rows - self.plan.row_count)
        slots = inputs.slots.device[: shape.rows]
        cache = PagedCache("test", self.pool, slots, inputs.metadata(shape), attend, write)
        padded = (torch.nn.functional.pad(each, padding) for each in (self.query, self.keys, self.values))
        return cache.compute(*padded, self.params, 0)[0]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_and_plain_torch_give_what_the_ragged_way_gives(name: str, seed: int) -> None:
    from outrider.lm.attention.kernels.tree_attention import attend_tiles

    attention = Attention(CASES[name], torch.float32, seed)
    with torch.inference_mode():
        expected = attention.ragged()
        plain, found = attention.static(attend_gathered), attention.static(attend_tiles)

    count = attention.plan.row_count
    assert expected.isfinite().all()
    torch.testing.assert_close(plain[:count], expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[:count], expected, rtol=1e-5, atol=1e-5)
    assert not found[count:].any(), "padding rows are zero"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_differs_by_its_own_rounding_alone(dtype: torch.dtype) -> None:
    from outrider.lm.attention.kernels.tree_attention import attend_tiles

    attention = Attention(Case(((150, 3, 6), (20, 0, 1))), dtype, seed=1)
    with torch.inference_mode():
        expected, found = attention.static(attend_gathered), attention.static(attend_tiles)

    error = (found - expected).float().norm() / expected.float().norm()
    assert error < (1e-2 if dtype is torch.bfloat16 else 1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "name", ["trees of several lengths", "a prefix in several spans", "sinks, a cap and a window"]
)
def test_the_kernel_reads_int8_as_the_ragged_way_does(name: str, dtype: torch.dtype) -> None:
    from outrider.lm.attention.kernels.int8_rows import write_rows
    from outrider.lm.attention.kernels.tree_attention import attend_tiles

    attention = Attention(CASES[name], dtype, 1, int8=True)
    with torch.inference_mode():
        expected = attention.ragged().float()
        plain = attention.static(attend_gathered)
        found = attention.static(attend_tiles, write_rows)

    count = attention.plan.row_count
    bound = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}[dtype]
    assert expected.isfinite().all()
    for each in (plain, found):
        assert (each[:count].float() - expected).norm() / expected.norm() < bound
    assert not found[count:].any(), "padding rows are zero"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.filterwarnings("ignore:invalid value")  # the interpreter's, where infinity becomes NaN
@torch.inference_mode()
def test_the_kernel_writes_the_codes_and_scales_of_plain_torch(dtype: torch.dtype) -> None:
    from outrider.lm.attention.kernels.int8_rows import write_rows

    random_numbers = torch.Generator().manual_seed(2)
    rows = torch.randn(3, 40, 24, generator=random_numbers) * torch.logspace(-30, 30, 40)[:, None]
    rows[:, 0] = 0.0
    rows[:, 1] = torch.arange(-11.5, 12.5)
    rows[:, 1, 0] = 127.0
    rows[0, 2, 5], rows[1, 3, 6] = float("nan"), float("inf")
    slots = torch.randperm(64, generator=random_numbers)[:40]
    layout = KVLayout(((3, 24),), dtype, torch.device("cpu"), int8=True)
    planes = [SlotPool(layout, 64, 64).planes()[0] for _ in range(2)]
    for plane in planes:
        for part in storage_of(plane):
            part.zero_()
    # Heads lie behind rows in a pass's keys.
    given = rows.to(dtype).transpose(0, 1).contiguous().transpose(0, 1)
    planes[0].index_copy_(1, slots, given)
    write_rows(planes[1], slots, given)

    (codes, scales), (own_codes, own_scales) = (storage_of(plane) for plane in planes)
    known = scales.isfinite()
    assert known.sum() == scales.numel() - 2
    assert torch.equal(known, own_scales.isfinite())
    assert torch.equal(scales[known], own_scales[known])
    assert torch.equal(codes * known, own_codes * known)
    assert planes[1].index_select(1, slots[2:4]).isnan().any(-1).sum() == 2


def test_the_kernel_writes_floats_as_they_are() -> None:
    from outrider.lm.attention.kernels.int8_rows import write_rows

    plane, rows, slots = torch.zeros(2, 9, 8), torch.randn(2, 3, 8), torch.tensor([7, 0, 4])
    write_rows(plane, slots, rows)
    assert torch.equal(plane[:, slots], rows)
    assert plane.abs().sum() == rows.abs().sum()


def test_a_model_on_the_kernel_gives_the_logits_of_ragged_passes() -> None:
    model = model_of("mistral", num_hidden_layers=2)
    static, ragged = PackedLM(twin_of(model)), PackedLM(model)
    use_graphs(static, "triton")
    prompt = [at % VOCABULARY for at in range(20)]
    found = []
    for lm in (static, ragged):
        table, other = lm.table(), lm.table()
        for each in (table, other):
            lm.forward([SequenceRows(each, prompt, range(-1, 19), ())])
            each.commit(range(20))
        lm.forward([SequenceRows(table, [3, 4, 5], [-1, -1, 1], ()), SequenceRows(other, [6], [-1], ())])
        table.commit([1, 2])
        sequences = [SequenceRows(table, [7, 8], [-1, -1], [0, 1]), SequenceRows(other, [9], [0], [0])]
        found.append(logits_of(lm, sequences))

    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


COMPILES = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from outrider.lm.attention.kernels import tree_attention

def ptx(kernel, dtype, constants):
    kinds = dict.fromkeys(("query", "keys", "values", "output", "sinks"), "*" + dtype)
    kinds |= dict.fromkeys(("key_scales", "value_scales"), "*" + dtype)
    kinds |= dict.fromkeys(("parts", "norms"), "*fp32") | dict.fromkeys(("scale", "softcap"), "fp32")
    arrays = ("items", "tiles", "spans", "first", "upto", "masks", "tables", "row_tile")
    kinds |= dict.fromkeys(arrays, "*i32") | dict.fromkeys(constants, "constexpr")
    names = [parameter.name for parameter in kernel.params]
    signature = {name: kinds.get(name, "i32") for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    return compile(ASTSource(kernel, signature, values), target=GPUTarget("cuda", 90, 32)).asm["ptx"]

shape = dict(GROUPS=4, VALUE_WIDTH=128, VALUE_PADDED=128, SIDE=16, HAS_SINKS=True)
item = dict(shape, WIDTH=128, PADDED=128, MASK_WORDS=8, PAGE=16, HAS_CAP=True, IS_INT8=False, WIDEN=False)
print("mma.sync" in ptx(tree_attention._attend_item, "bf16", dict(item, KEYS=64)))
print("wgmma" in ptx(tree_attention._attend_item, "bf16", dict(item, KEYS=64, SIDE=64)))
print("tf32" in ptx(tree_attention._attend_item, "fp32", dict(item, KEYS=32)))
print("st.global" in ptx(tree_attention._join_items, "bf16", shape))
"""


@pytest.mark.slow
def test_the_kernels_compile_for_a_gpu_on_matrix_units_and_without_tf32(tmp_path: Path) -> None:
    own = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    path = os.pathsep.join([str(ROOT), *sys.path])
    ended = subprocess.run(
        [sys.executable, "-c", COMPILES],
        env={**os.environ, **own, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )

    assert ended.stdout.split() == ["True", "True", "False", "True"], ended.stderr
