"""The compiled kernel of sampled tokens: built once for each processor, checked against the rule, loaded.

It draws noise bits and chooses tokens from rows of logits in memory, for `speculative.sampling_kernel`. One
call serves all rows of a step and lets other threads run meanwhile. `row_kernel.cpp` has the arithmetic.
"""

import ctypes
import hashlib
import logging
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from outrider.lm.compiled.building import BuildLimits, build_in
from outrider.lm.compiled.order import find_compiler, processor_flags
from outrider.lm.compiled.store import CompileFailed, PackageStore
from speculative.batch_choice import RowChoice, kernel_row
from speculative.choice import choose_token
from speculative.digest import HostDigest, relative_error
from speculative.history import History
from speculative.noise import LEADS, PositionNoise, lead_bounds, leads, strong_lead
from speculative.params import SamplingParams
from speculative.sampling_kernel import KernelRow, current_kernel, use_kernel

log = logging.getLogger(__name__)

KERNELS = "kernels"
"""Folder of the kernel's packages below the cache folder."""

_LIBRARY = "row_kernel.so"
_SOURCE = Path(__file__).with_name("row_kernel.cpp")
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-shared", "-Wno-psabi")
_ROW = struct.Struct("<qqqQQqqqqddddq")
_LEAST_STRONG = LEADS - LEADS // 32
_LIMITS = BuildLimits(seconds=120.0, megabytes=256)


class RowKernel:
    """The kernel in a library. A SamplingKernel."""

    def __init__(self, library: Path) -> None:
        loaded = ctypes.CDLL(str(library))
        self._leads = loaded.outrider_leads
        self._leads.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64, ctypes.c_void_p)
        self._leads.restype = None
        self._sample = loaded.outrider_sample
        self._sample.argtypes = (ctypes.c_char_p, ctypes.c_int64, *[ctypes.c_void_p] * 3)
        self._sample.restype = None
        self._bounds = lead_bounds()

    def leads(self, seed: int, position: int, vocabulary_size: int) -> NDArray[np.uint16]:
        """The leading 16 bits of each id at `position`: uint16[vocabulary_size]."""
        drawn = np.empty(vocabulary_size, dtype=np.uint16)
        self._leads(seed, position, vocabulary_size, _address(drawn))
        return drawn

    def tokens(self, rows: Sequence[KernelRow]) -> list[int | None]:
        """The token of each row; None where `choose_token` has to decide."""
        tokens = np.empty(len(rows), dtype=np.int64)
        low, high = self._bounds
        packed = b"".join([_packed(row) for row in rows])
        self._sample(packed, len(rows), _address(low), _address(high), _address(tokens))
        return [None if token < 0 else token for token in tokens.tolist()]


def use_row_kernel(cache_dir: Path, is_stopped: Callable[[], bool], compiles: bool = True) -> None:
    """Has this process choose sampled tokens by the kernel, from the cache or, if it ``compiles``, built now.

    Where no kernel can be had, NumPy goes on choosing, and a line in the log says why.
    """
    if current_kernel() is not None:
        return
    try:
        library = _library(PackageStore(cache_dir / KERNELS), is_stopped, compiles)
        if library is None:
            return
        kernel = RowKernel(library)
        check_kernel(kernel)
    except Exception as error:  # whatever it is, NumPy goes on
        if compiles and not is_stopped():
            log.info("sampled tokens are chosen in NumPy: %s", error)
    else:
        use_kernel(kernel)


def compile_kernel(compiler: str, folder: Path) -> list[str]:
    """The command that compiles the kernel's library into ``folder`` for this processor."""
    return [compiler, *_FLAGS, str(_SOURCE), "-o", str(folder / _LIBRARY)]


def check_kernel(kernel: RowKernel) -> None:
    """Raises CompileFailed unless the kernel draws NumPy's bits and gives the rule's tokens on some rows."""
    for seed, position, size in ((0, 0, 16), (2**64 - 1, 2**40, 997), (7, 3, 40_000)):
        if not np.array_equal(kernel.leads(seed, position, size), leads(seed, position, size)):
            raise CompileFailed("the compiled kernel draws other noise bits than NumPy")
    history = History.of([1, 5, 5, 9], 2)
    requests = (
        SamplingParams(),
        SamplingParams(temperature=0.8, top_p=0.9),
        SamplingParams(temperature=1.3, top_k=20, min_p=0.01),
        SamplingParams(repetition_penalty=1.2, frequency_penalty=0.4, top_p=0.5),
    )
    for seed, params in enumerate(requests * 8):
        row = np.random.default_rng(seed).normal(size=600 + 37 * seed).astype(np.float32) * (1 + seed % 5)
        choice = RowChoice(HostDigest(row), params, history, PositionNoise(seed, 11, len(row)))
        (token,) = kernel.tokens([kernel_row(choice)])
        if token not in (None, choose_token(*choice)):
            raise CompileFailed(f"the compiled kernel chooses token {token} where the rule does not")


def _library(store: PackageStore, is_stopped: Callable[[], bool], compiles: bool) -> Path | None:
    """The kernel's library; None where the cache lacks it and it is not to be compiled.

    Raises CompileFailed.
    """
    compiler = find_compiler()
    if compiler is None:
        raise CompileFailed("there is no C++ compiler (g++) on the PATH; install one")
    parts = [_SOURCE.read_text(), compiler, " ".join(_FLAGS), processor_flags()]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    found = store.find(key)
    if found is None and not compiles:
        return None
    if found is None:
        found = build_in(
            store, key, (_LIBRARY,), lambda folder: compile_kernel(compiler, folder), is_stopped, _LIMITS
        )
    return found / _LIBRARY


def _address(array: NDArray[np.generic]) -> int:
    return int(array.__array_interface__["data"][0])


def _packed(row: KernelRow) -> bytes:
    """A row as the struct Row of `row_kernel.cpp`, which reads `width` numbers of each array unchecked."""
    width = len(row.logits)
    if len(row.leads) < width or row.logits.dtype != np.float32:
        raise ValueError(
            f"a row of {width} {row.logits.dtype} logits has noise for {len(row.leads)} ids; it takes float32"
        )
    return _ROW.pack(
        _address(row.logits),
        _address(row.leads),
        width,
        row.seed,
        row.position,
        _address(row.named),
        _address(row.scores),
        len(row.named),
        row.top_k,
        row.temperature,
        row.top_p,
        row.min_p,
        relative_error(width),
        max(strong_lead(width), _LEAST_STRONG),
    )
