"""What `auto` stands for, and how much of a GPU keys and values get."""

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from outrider.lm import transfer
from outrider.lm.device import memory
from outrider.lm.device.memory import fit_pool, kv_bytes, run_largest
from outrider.lm.device.placement import GpuOptions, find_device, find_dtype, keep_products_exact
from outrider.lm.kv.blocks import BLOCK
from outrider.lm.runner import PackedLM
from speculative.errors import InvalidRequest
from tests.lm.families import model_of

GIB = 2**30
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(("gpus", "found"), [(0, "cpu"), (2, "cuda")])
def test_auto_is_a_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch, gpus: int, found: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)

    assert find_device("auto") == torch.device(found)
    assert find_device("cpu") == CPU
    with pytest.raises(InvalidRequest, match=f"device = 'cuda:2'.* sees {gpus} CUDA devices"):
        find_device("cuda:2")


def test_text_that_names_no_device_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(InvalidRequest, match="'gpu0' is no torch device; give auto, cpu, cuda or cuda:1"):
        find_device("gpu0")


@pytest.mark.parametrize(
    ("asked", "device", "stored", "found"),
    [
        ("auto", CPU, torch.bfloat16, "float32"),
        ("auto", CUDA, torch.bfloat16, "bfloat16"),
        ("auto", CUDA, "float16", "float16"),
        ("auto", CUDA, None, "float32"),
        ("auto", CUDA, "float8_e4m3fn", "bfloat16"),
        ("float32", CUDA, torch.bfloat16, "float32"),
        ("bfloat16", CPU, torch.float32, "bfloat16"),
    ],
)
def test_a_gpu_computes_in_the_checkpoints_dtype_and_a_cpu_in_float32(
    monkeypatch: pytest.MonkeyPatch, asked: str, device: torch.device, stored: object, found: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda emulated: True)
    assert find_dtype(asked, device, stored) == found


def test_a_gpu_without_bfloat16_computes_such_a_model_in_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda emulated: emulated)
    assert find_dtype("auto", CUDA, torch.bfloat16) == "float16"


@pytest.mark.parametrize(
    ("total", "free", "own", "step", "left"),
    [
        (80, 63, 16, 2, 54),  # alone on the GPU: the share of it decides
        (80, 20, 16, 2, 18),  # a GPU that others use: what they left decides
        (10, 6, 3, 4, 2),
        (10, 1, 9, 2, 0),
    ],
)
def test_keys_and_values_get_what_weights_and_the_largest_step_leave(
    total: int, free: int, own: int, step: int, left: int
) -> None:
    assert kv_bytes(total * GIB, free * GIB, own * GIB, step * GIB, 0.9) == left * GIB


def test_the_largest_step_is_run_before_the_pool_gets_the_rest(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lm = PackedLM(
        model_of("llama", num_hidden_layers=1), gpu=GpuOptions(max_rows=130, memory_utilization=0.5)
    )
    passes: list[int] = []
    forward = lm.forward
    monkeypatch.setattr(
        lm,
        "forward",
        lambda given: (passes.append(sum(len(each.tokens) for each in given)), forward(given))[1],
    )
    for name, value in {
        "empty_cache": None,
        "reset_peak_memory_stats": None,
        "memory_allocated": 2 * GIB,
        "max_memory_allocated": 3 * GIB,
        "memory_reserved": 2 * GIB,
        "mem_get_info": (4 * GIB, 8 * GIB),
    }.items():
        monkeypatch.setattr(memory.torch.cuda, name, lambda *_, value=value: value)
    room: list[int] = []
    monkeypatch.setattr(lm.pool, "fit", room.append)

    fit_pool(lm, lambda slots: slots // 2)

    assert passes == [128]
    assert room == [GIB // lm.pool.layout.slot_bytes // 2]
    assert (lm.forward_calls, lm.rows, lm.pool.used_slots) == (0, 0, 0)
    assert "other processes use 2.0 GiB of this GPU" in caplog.text


def test_the_largest_step_has_as_many_rows_as_any(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = PackedLM(model_of("llama", num_hidden_layers=1), gpu=GpuOptions(max_rows=10**6))
    rows: list[int] = []
    monkeypatch.setattr(lm, "forward", lambda given: rows.append(sum(len(each.tokens) for each in given)))

    run_largest(lm)

    assert rows == [4096]


def test_a_fitted_pool_has_all_its_storage_and_keeps_what_it_had() -> None:
    lm = PackedLM(model_of("llama"), kv_mb=64)
    table = lm.table(reserve=2 * BLOCK)
    lm.pool.fit(300 * BLOCK)

    assert lm.pool.slots == lm.pool.max_slots == 300 * BLOCK
    lm.pool.fit(0)
    assert lm.pool.slots == lm.pool.max_slots == 300 * BLOCK
    lm.release(table)
    assert lm.pool.used_slots == 0


def test_a_loaded_model_says_what_was_chosen(tiny_llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    lm = PackedLM.load(tiny_llama, device="auto", dtype="auto", kv_mb=None)

    (said,) = [record for record in caplog.records if record.message == "the model is loaded"]
    fields = said.__dict__["fields"]
    assert (fields["device"], fields["dtype"], fields["passes"]) == ("cpu", "float32", "eager")
    assert fields["kv_mb"] == 1024 == lm.pool.max_slots * lm.pool.layout.slot_bytes // 2**20
    assert lm.numerics == "cpu float32"


def exactness() -> list[object]:
    """What torch is told of products on a GPU and of cuDNN's attention."""
    matmul = torch.backends.cuda.matmul
    return [
        torch.get_float32_matmul_precision(),
        matmul.allow_tf32,
        torch.backends.cudnn.allow_tf32,
        matmul.allow_bf16_reduced_precision_reduction,
        matmul.allow_fp16_reduced_precision_reduction,
        torch.backends.cuda.cudnn_sdp_enabled(),
    ]


def tell_torch(precision: str, tf32: bool, bf16: bool, fp16: bool, cudnn: bool) -> None:
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = bf16
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = fp16
    torch.backends.cuda.enable_cudnn_sdp(cudnn)


@pytest.fixture
def inexact() -> Iterator[None]:
    """A torch that may round products as it likes; afterwards it is told again what it was told before."""
    precision, _, *others = exactness()
    tell_torch("high", True, True, True, True)
    assert exactness() == ["high", True, True, True, True, True]
    yield
    tell_torch(precision, *others)  # type: ignore[arg-type]


@pytest.mark.usefixtures("inexact")
def test_products_on_a_gpu_are_as_exact_as_their_dtype_and_attention_has_no_plans_per_shape() -> None:
    keep_products_exact()

    assert exactness() == ["highest", False, False, False, False, False]


class CurrentGpu:
    """Stands in for torch's own context: the GPUs that are current, innermost last."""

    entered: ClassVar[list[str]] = []

    def __init__(self, device: torch.device) -> None:
        self._name = str(device)

    def __enter__(self) -> None:
        self.entered.append(self._name)

    def __exit__(self, *error: object) -> None:
        assert self.entered.pop() == self._name


@pytest.mark.parametrize(
    ("device", "gpus", "entered"),
    [("cuda:1", 2, ["cuda:1"]), ("cuda:1", 0, []), ("cpu", 2, [])],
)
def test_a_gpu_is_the_current_one_inside_the_block_each_time_it_is_entered(
    monkeypatch: pytest.MonkeyPatch, device: str, gpus: int, entered: list[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device", CurrentGpu)
    current = transfer.current(torch.device(device))
    for _ in range(2):
        with current:
            assert CurrentGpu.entered == entered
        assert not CurrentGpu.entered
