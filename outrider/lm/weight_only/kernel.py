"""The compiled product over panels of bfloat16 or int8: built once for each processor, for eager passes.

Panels take this kernel: torch multiplies float32 rows by int8 weights one by one, and by bfloat16 not at all.
"""

import ctypes
import tempfile
from functools import cache
from pathlib import Path

import torch

from outrider.compiling.store import CompileFailed
from outrider.compiling.toolchain import processor_flags
from outrider.lm.compiled.torch_library import torch_library
from outrider.lm.weight_only.packing import PackedWeight
from speculative.errors import InvalidRequest

_LIBRARY = torch_library("weight_only_kernel")
_INSTRUCTIONS = "avx512f"
"""Instructions that the kernel is measured with: the widening of bfloat16 and int8 to 16 floats at a time."""


class WeightOnlyKernel:
    """The kernel in a library."""

    def __init__(self, library: Path) -> None:
        loaded = ctypes.CDLL(str(library))
        self.width = int(loaded.outrider_panel_width())
        """Number of outputs of a panel."""
        self._multiply = loaded.outrider_multiply
        self._multiply.argtypes = (
            ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, *[ctypes.c_void_p] * 4, ctypes.c_int64
        )  # fmt: skip
        self._multiply.restype = ctypes.c_int64

    def multiply(self, rows: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
        """Float32 ``rows [..., in]`` times the weight, plus the bias: ``[..., out]``.

        The sum of an output runs over the inputs in order, so a row's bits do not depend on other rows.
        Raises ValueError for rows of another dtype or width: the library reads and writes by address.
        """
        rows = rows.contiguous()
        inputs = weight.panels.shape[1]
        if rows.dtype is not torch.float32 or rows.shape[-1] != inputs:
            raise ValueError(f"rows are {tuple(rows.shape)} {rows.dtype}; give float32 [..., {inputs}]")
        made = rows.new_empty(*rows.shape[:-1], weight.out_features)
        failed = self._multiply(
            rows.data_ptr(),
            rows.numel() // inputs,
            inputs,
            weight.panels.data_ptr(),
            None if weight.scales is None else weight.scales.data_ptr(),
            None if bias is None else bias.data_ptr(),
            made.data_ptr(),
            weight.out_features,
        )
        if failed:
            raise RuntimeError("the kernel of weights in bfloat16 and int8 failed")
        return made


def load_kernel(setting: str, cache_dir: Path | None) -> WeightOnlyKernel:
    """The kernel, from the cache or compiled now, which takes three seconds.

    Raises InvalidRequest, which begins with the ``setting``, where the processor lacks the instructions or no
    kernel can be compiled.
    """
    if _INSTRUCTIONS not in processor_flags().split():
        raise InvalidRequest(
            f"{setting}: this processor lacks {_INSTRUCTIONS}, which the kernels of such weights take; leave "
            "weight_dtype out"
        )
    try:
        return _load_once() if cache_dir is None else _load(cache_dir)
    except (CompileFailed, OSError) as error:
        raise InvalidRequest(
            f"{setting}: the kernel of such weights cannot be compiled: {error}, or leave weight_dtype out"
        ) from error


@cache
def _load_once() -> WeightOnlyKernel:
    """The kernel without a cache folder: compiled once for this process. Raises CompileFailed."""
    with tempfile.TemporaryDirectory(prefix="outrider-kernel-") as folder:
        return _load(Path(folder))


def _load(cache_dir: Path) -> WeightOnlyKernel:
    """The kernel of this cache folder, compiled where it has none. Raises CompileFailed."""
    library = _LIBRARY.find(cache_dir, lambda: False, compiles=True)
    assert library is not None
    return WeightOnlyKernel(library)
