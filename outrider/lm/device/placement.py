"""Finds where a model computes, in which dtype, and its share of a GPU: what ``auto`` stands for."""

from dataclasses import dataclass
from typing import Literal

import torch

from speculative.errors import InvalidRequest

AUTO = "auto"
CPU_KV_MB = 1024
"""Memory for keys and values on the CPU where it is ``auto``, in MiB."""

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
"""The dtypes that models compute in, by name."""

CudaGraphsMode = Literal["require", "prefer", "off"]


@dataclass(frozen=True, slots=True)
class GpuOptions:
    """How passes run on a GPU, and how much of it they may take. A CPU ignores them."""

    cuda_graphs: CudaGraphsMode = "prefer"
    """``require``: a model whose passes cannot run as captured graphs is refused; ``prefer``: they run as
    graphs where graphs work and are faster; ``off``: they are ragged."""
    memory_utilization: float = 0.92
    """Share of the GPU's memory that the process may take where ``kv_mb`` is ``auto``."""
    capture_s: float = 120.0
    """Seconds after which sizes of steps that can do without a graph of their own are left uncaptured."""
    max_rows: int = 4096
    """Largest number of rows of a step of static shape."""
    compile_layers: bool = False
    """Whether layers are compiled for static steps; they stay compiled if steps are right and not slower."""


def kv_mb_of(asked: int | str) -> int | None:
    """The memory for keys and values that a setting names, in MiB; None for ``auto``."""
    return None if isinstance(asked, str) else asked


def find_device(asked: str) -> torch.device:
    """The torch device that a setting names; for ``auto`` CUDA where there is a GPU, else the CPU.

    Raises InvalidRequest for text that names no device, and for a GPU that is not there.
    """
    if asked == AUTO:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(asked)
    except RuntimeError as error:
        raise InvalidRequest(
            f"device = {asked!r} is no torch device; give auto, cpu, cuda or cuda:1"
        ) from error
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise InvalidRequest(
                f"device = {asked!r}: torch {torch.__version__} sees {count} CUDA devices here; "
                "a CUDA build of torch and the driver are needed, or device = cpu"
            )
    return device


def find_dtype(asked: str, device: torch.device, of_checkpoint: object) -> str:
    """Name of the dtype to compute in; for ``auto`` the checkpoint's on a GPU, float32 on a CPU.

    ``of_checkpoint`` is the dtype in the model's configuration, as a torch dtype or its name. Where the
    configuration has none it is float32, and bfloat16 where its dtype is for storage alone. A GPU without
    bfloat16 computes such a model in float16.
    """
    if asked != AUTO:
        return asked
    if device.type == "cpu":
        return "float32"
    named = str(of_checkpoint or torch.float32).removeprefix("torch.")
    if named not in DTYPES:
        named = "bfloat16"
    if named == "bfloat16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(False):
        return "float16"
    return named


def keep_products_exact() -> None:
    """Makes products on a GPU as exact as their dtype, and keeps plans per shape out of ragged attention."""
    # TF32 keeps ten bits of a float32; sums of parts in half precision lose as much.
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    # cuDNN's attention builds a plan for every new length of keys, which takes longer than the pass.
    torch.backends.cuda.enable_cudnn_sdp(False)
