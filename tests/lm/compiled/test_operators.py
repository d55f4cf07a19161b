"""The operators of a compiled pass against torch's product and against attention of eager passes."""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.compiling.toolchain import find_compiler
from outrider.lm.attention.interface import AttentionParams, SlotCache
from outrider.lm.compiled.child import compile_operators
from outrider.lm.compiled.container import new_handle, tensor_of
from outrider.lm.compiled.panels import panels_of
from outrider.lm.compiled.step_block import plane_words, step_block
from outrider.lm.kv.blocks import BLOCK
from outrider.lm.kv.int8_plane import Int8Plane
from outrider.lm.kv.pool import KVLayout, SlotPool
from outrider.lm.kv.table import SlotTable
from outrider.lm.plan import PassPlan, SequenceRows
from outrider.lm.weight_only.packing import PackedWeight, WeightDtype

pytestmark = pytest.mark.slow

HEADS, KEY_HEADS = 4, 2
TREE = (-1, -1, 0, 0, 1, 2, 2, 4)


class Operators:
    """The operators' library, called with tensors as compiled code calls it."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self.width: int = self._library.outrider_panel_width()

    def use_threads(self, threads: int) -> None:
        self._library.outrider_use_threads(threads)

    def panel_linear(
        self,
        rows: torch.Tensor,
        panels: torch.Tensor,
        bias: torch.Tensor | None,
        outputs: int,
        scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        made = ctypes.c_void_p()
        assert not self._library.aoti_torch_cpu_panel_linear(
            _handle(rows),
            _handle(panels),
            _optional(bias),
            _optional(scales),
            ctypes.c_int64(outputs),
            ctypes.byref(made),
        )
        return tensor_of(made.value)

    def attend_slots(
        self, tensors: Sequence[torch.Tensor], params: AttentionParams, layer: int
    ) -> torch.Tensor:
        made = ctypes.c_void_p()
        assert not self._library.aoti_torch_cpu_attend_slots(
            *map(_handle, tensors),
            _optional(params.sinks),
            ctypes.c_int64(layer),
            ctypes.c_double(params.scaling or 0.0),
            ctypes.c_int64(params.window or 0),
            ctypes.c_double(params.softcap or 0.0),
            ctypes.byref(made),
        )
        return tensor_of(made.value)


def _handle(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(new_handle(tensor))


def _optional(tensor: torch.Tensor | None) -> object:
    return None if tensor is None else ctypes.byref(_handle(tensor))


@pytest.fixture(scope="module")
def operators(tmp_path_factory: pytest.TempPathFactory) -> Operators:
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("there is no C++ compiler here")
    return Operators(compile_operators(compiler, tmp_path_factory.mktemp("operators")))


@pytest.mark.parametrize("outputs", [1, 61, 64, 96])
@pytest.mark.parametrize("count", [1, 3, 8, 21])
def test_a_product_is_torchs_and_has_the_same_bits_alone(
    operators: Operators, outputs: int, count: int
) -> None:
    weight, rows, bias = torch.randn(outputs, 40), torch.randn(1, count, 40), torch.randn(outputs)
    panels = panels_of(weight, operators.width)
    found = operators.panel_linear(rows, panels, bias, outputs)
    assert torch.allclose(found, torch.nn.functional.linear(rows, weight, bias), atol=1e-5)
    for row in range(count):
        alone = operators.panel_linear(rows[:, row : row + 1], panels, bias, outputs)
        assert torch.equal(alone[0, 0], found[0, row])


@pytest.mark.parametrize("name", ["bfloat16", "int8"])
def test_a_product_over_other_weights_is_that_over_their_values(
    operators: Operators, name: WeightDtype
) -> None:
    weight, rows, bias = torch.randn(61, 40), torch.randn(1, 11, 40), torch.randn(61)
    packed = PackedWeight.of(weight, name, operators.width)
    found = operators.panel_linear(rows, packed.panels, bias, 61, packed.scales)
    over_floats = operators.panel_linear(rows, panels_of(packed.dense(), operators.width), bias, 61)
    if name == "bfloat16":
        assert torch.equal(found, over_floats)
    else:
        assert torch.allclose(found, over_floats, atol=1e-5)
    assert torch.equal(
        operators.panel_linear(rows[:, 3:4], packed.panels, bias, 61, packed.scales)[0, 0], found[0, 3]
    )


def contents(pool: SlotPool) -> list[torch.Tensor]:
    """What the second layer's slots hold: their numbers, and the scales of int8."""
    tensors: list[torch.Tensor] = []
    for plane in pool.planes()[2:]:
        kept: Any = plane
        tensors += (kept.codes, kept.scales) if isinstance(kept, Int8Plane) else (kept,)
    return [tensor[:, : pool.slots].nan_to_num().clone() for tensor in tensors]


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_is_not_finite_in_int8_either(
    operators: Operators, number: float
) -> None:
    layout = KVLayout(((KEY_HEADS, 8), (KEY_HEADS, 8)), torch.float32, torch.device("cpu"), int8=True)
    pool = SlotPool(layout, BLOCK)
    plan = PassPlan([SequenceRows(SlotTable(pool), (0,), (-1,), ())], pool, torch.float32)
    query = torch.randn(1, HEADS, 1, 8)
    keys, values = torch.randn(2, 1, KEY_HEADS, 1, 8)
    values[0, 0, 0, 3] = number
    block = step_block(plan.rows, plane_words(pool.planes()))
    found = operators.attend_slots((query, keys, values, block), PARAMS["plain"], 0)
    groups = HEADS // KEY_HEADS
    assert not found[0, 0, :groups].isfinite().any()
    assert found[0, 0, groups:].isfinite().all(), "each key head has scales of its own"


PARAMS = {
    "plain": AttentionParams(0.3, None, None, None),
    "window": AttentionParams(0.3, 6, None, None),
    "capped": AttentionParams(0.3, None, 2.0, None),
    "sinks": AttentionParams(0.3, None, None, torch.tensor([0.5, -1.0, 2.0, 0.0])),
}


@torch.inference_mode()
@pytest.mark.parametrize("int8", [False, True], ids=["float32", "int8"])
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
@pytest.mark.parametrize(("key_width", "width"), [(8, 8), (24, 12), (64, 64), (128, 128), (96, 80)])
def test_attention_over_slots_is_that_of_eager_passes(
    operators: Operators, params: AttentionParams, key_width: int, width: int, int8: bool
) -> None:
    planes = ((KEY_HEADS, key_width), (KEY_HEADS, width)) * 2
    pool = SlotPool(KVLayout(planes, torch.float32, torch.device("cpu"), int8=int8), 64 * BLOCK)
    tables = [SlotTable(pool) for _ in range(3)]
    # Steps in turn, so that the blocks of a session lie apart.
    for count, parents in ((19, range(-1, 18)), (1, (-1,)), (17, range(-1, 16)), (8, TREE)):
        plan = PassPlan(
            [SequenceRows(table, (0,) * count, parents, ()) for table in tables], pool, torch.float32
        )
        rows = plan.row_count
        query = torch.randn(1, rows, HEADS, key_width).transpose(1, 2)
        keys = torch.randn(1, KEY_HEADS, rows, key_width)
        values = torch.randn(1, rows, KEY_HEADS, width).transpose(1, 2)
        block = step_block(plan.rows, plane_words(pool.planes()))
        found = operators.attend_slots((query, keys, values, block), params, 1)
        written = contents(pool)
        expected = SlotCache("toy", pool, plan).compute(query, keys, values, params, 1)
        assert torch.allclose(found, expected, atol=2e-5)
        assert all(map(torch.equal, written, contents(pool)))
        plan.keep_nodes()
        for table in tables:
            table.commit((0, 2) if parents is TREE else range(count))


@torch.inference_mode()
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
@pytest.mark.parametrize(("key_width", "width"), [(8, 8), (24, 12), (64, 64)])
def test_a_row_has_the_same_bits_alone_and_beside_the_rows_before_it(
    operators: Operators, params: AttentionParams, key_width: int, width: int
) -> None:
    planes = ((KEY_HEADS, key_width), (KEY_HEADS, width))
    pool = SlotPool(KVLayout(planes, torch.float32, torch.device("cpu")), 8 * BLOCK)
    query, keys = torch.randn(1, HEADS, 41, key_width), torch.randn(1, KEY_HEADS, 41, key_width)
    values = torch.randn(1, KEY_HEADS, 41, width)

    def attended(size: int) -> torch.Tensor:
        """Output ``[1, 41, heads, width]`` of passes of ``size`` rows."""
        table, found = SlotTable(pool), []
        for low in range(0, 41, size):
            rows = slice(low, min(low + size, 41))
            count = rows.stop - low
            own = [SequenceRows(table, (0,) * count, range(-1, count - 1), ())]
            plan = PassPlan(own, pool, torch.float32)
            block = step_block(plan.rows, plane_words(pool.planes()))
            tensors = (query[:, :, rows], keys[:, :, rows], values[:, :, rows], block)
            found.append(operators.attend_slots(tensors, params, 0))
            plan.keep_nodes()
            table.commit(range(count))
        table.close()
        return torch.cat(found, dim=1)

    alone = attended(1)
    assert all(torch.equal(attended(size), alone) for size in (3, 8, 41))
