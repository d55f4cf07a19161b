"""The compiled kernel of chosen tokens: built once for each processor, checked against the rule, loaded.

It draws noise bits and chooses tokens from rows of logits in memory, for `speculative.sampling_kernel`. One
call serves all rows of a step and lets other threads run meanwhile. `row_kernel.cpp` has the arithmetic.
"""

import ctypes
import logging
import struct
from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.compiling.library import LibrarySource
from outrider.compiling.store import CompileFailed
from speculative.batch_choice import RowChoice
from speculative.choice import choose_token
from speculative.digest import HostDigest, relative_error
from speculative.history import History
from speculative.noise import LEAST_STRONG, PositionNoise, lead_bounds, leads, strong_lead
from speculative.params import SamplingParams
from speculative.sampling import holds_back, masked
from speculative.sampling_kernel import current_kernel, use_kernel

log = logging.getLogger(__name__)

_LIBRARY = LibrarySource(
    source=Path(__file__).with_name("row_kernel.cpp"),
    # A fused product and sum has other bits than the rule's two operations.
    flags=("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fPIC", "-shared", "-Wno-psabi"),
    name="row_kernel.so",
)
_ROW = struct.Struct("<qqqqQQ15q4dq3dq")
_WAYS = ("singly", "in vectors")
"""Ways to draw noise bits, as `philox.hpp` numbers them; not every processor has all."""


class RowKernel:
    """The kernel in a library. A SamplingKernel."""

    def __init__(self, library: Path) -> None:
        loaded = ctypes.CDLL(str(library))
        self._leads = loaded.outrider_leads
        self._leads.argtypes = (
            ctypes.c_int,
            ctypes.c_uint64,
            ctypes.c_uint64,
            ctypes.c_int64,
            ctypes.c_void_p,
        )
        self._leads.restype = None
        self._choose = loaded.outrider_choose
        self._choose.argtypes = (ctypes.c_char_p, ctypes.c_int64, *[ctypes.c_void_p] * 3)
        self._choose.restype = None
        self.ways = _WAYS[: loaded.outrider_ways()]
        """Ways in which this processor can draw noise bits."""
        self.way = self.ways[loaded.outrider_quickest_way()]
        """The way that was the quickest here."""
        self._bounds = lead_bounds()
        self._low, self._high = (_address(bounds) for bounds in self._bounds)

    def leads(self, seed: int, position: int, vocabulary_size: int) -> NDArray[np.uint16]:
        """The leading 16 bits of each id at `position`: uint16[vocabulary_size]."""
        return self.leads_by(self.way, seed, position, vocabulary_size)

    def leads_by(self, way: str, seed: int, position: int, vocabulary_size: int) -> NDArray[np.uint16]:
        """As `leads`, drawn in one of `ways`."""
        drawn = np.empty(vocabulary_size, dtype=np.uint16)
        self._leads(_WAYS.index(way), seed, position, vocabulary_size, _address(drawn))
        return drawn

    def tokens(self, choices: Sequence[RowChoice]) -> list[int | None]:
        """The token of each choice; None where `choose_token` has to decide."""
        tokens = array("q", bytes(8 * len(choices)))
        used: list[Any] = []  # arrays that the rows refer to
        packed = b"".join([_packed(choice, used) for choice in choices])
        self._choose(packed, len(choices), self._low, self._high, tokens.buffer_info()[0])
        return [None if token < 0 else token for token in tokens]


def use_row_kernel(cache_dir: Path, is_stopped: Callable[[], bool], compiles: bool = True) -> None:
    """Has this process choose sampled tokens by the kernel, from the cache or, if it ``compiles``, built now.

    Where no kernel can be had, NumPy goes on choosing, and a line in the log says why.
    """
    if current_kernel() is not None:
        return
    try:
        library = _LIBRARY.find(cache_dir, is_stopped, compiles)
        if library is None:
            return
        kernel = RowKernel(library)
        check_kernel(kernel)
    except Exception as error:  # whatever it is, NumPy goes on
        if compiles and not is_stopped():
            log.info("sampled tokens are chosen in NumPy: %s", error)
    else:
        use_kernel(kernel)
        fields = {"ways of noise bits": kernel.ways, "chosen": kernel.way}
        log.info("sampled tokens are chosen by the compiled kernel", extra={"fields": fields})


def check_kernel(kernel: RowKernel) -> None:
    """Raises CompileFailed unless the kernel draws NumPy's bits and gives the rule's tokens on some rows.

    Bits are drawn in every way of the kernel: another process on this machine may choose another one.
    """
    for seed, position, size in ((0, 0, 16), (2**64 - 1, 2**40, 997), (7, 3, 40_000)):
        expected = leads(seed, position, size)
        for way in kernel.ways:
            if not np.array_equal(kernel.leads_by(way, seed, position, size), expected):
                raise CompileFailed(f"the compiled kernel draws other noise bits than NumPy ({way})")
    history = History.of([1, 5, 5, 9], 2)
    requests = (
        SamplingParams(),
        SamplingParams(temperature=0.8, top_p=0.9),
        SamplingParams(temperature=1.3, top_k=20, min_p=0.01),
        SamplingParams(repetition_penalty=1.2, frequency_penalty=0.4, top_p=0.5),
        SamplingParams(temperature=0.0, repetition_penalty=1.2, presence_penalty=0.4),
    )
    for seed, params in enumerate(requests * 8):
        rng = np.random.default_rng(seed)
        row = rng.normal(size=600 + 37 * seed).astype(np.float32) * (1 + seed % 5)
        allowed = rng.random(len(row)) < 0.3 if seed % 3 == 0 else None
        noise = None if params.greedy else PositionNoise(seed, 11, len(row))
        choice = RowChoice(HostDigest(row), params, history, noise, allowed)
        (token,) = kernel.tokens([choice])
        if token not in (None, choose_token(*choice)):
            raise CompileFailed(f"the compiled kernel chooses token {token} where the rule does not")


def _address(array: NDArray[np.generic]) -> int:
    return int(array.__array_interface__["data"][0])


_NO_IDS = (0, 0, 0)
_UNCHANGED = 5 * _NO_IDS


def _packed(choice: RowChoice, used: list[Any]) -> bytes:
    """A choice as the struct Row of `row_kernel.cpp`, which reads `width` numbers of each row unchecked.

    Arrays made here are added to `used`, as the struct holds nothing but addresses.
    """
    digest, params, history, noise, allowed = choice
    width = digest.vocabulary_size
    return _ROW.pack(
        digest.address or _logits(digest, used),
        0 if noise is None else _leads(noise, width, used),
        0 if allowed is None else _mask(masked(allowed, params, holds_back(params, history)), width, used),
        width,
        0 if noise is None else noise.seed,
        0 if noise is None else noise.position,
        *(_UNCHANGED if params.plain_logits else _changed(choice, used)),
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
        0.0 if noise is None else params.temperature,
        params.top_k,
        params.top_p,
        params.min_p,
        *_of_width(width),
    )


def _logits(digest: HostDigest, used: list[Any]) -> int:
    row = digest.full()
    if row.dtype != np.float32:
        raise ValueError(f"a row has {row.dtype} logits; the kernel takes float32")
    row = np.ascontiguousarray(row)
    used.append(row)
    return _address(row)


def _leads(noise: PositionNoise, width: int, used: list[Any]) -> int:
    if noise.vocabulary_size < width:
        raise ValueError(f"a row of {width} logits has noise for {noise.vocabulary_size} ids")
    drawn = noise.drawn  # once: a thread that draws ahead may put another array in its place
    if drawn is None:
        return 0
    used.append(drawn)
    return _address(drawn)


def _mask(allowed: NDArray[np.bool_], width: int, used: list[Any]) -> int:
    if len(allowed) < width or allowed.dtype != np.bool_:
        raise ValueError(
            f"a row of {width} logits has a mask of {len(allowed)} {allowed.dtype}; it takes bool"
        )
    mask = np.ascontiguousarray(allowed)
    used.append(mask)
    return _address(mask)


def _changed(choice: RowChoice, used: list[Any]) -> list[int]:
    """The five structs Ids of a choice: biased, seen, generated, of the path, held back."""
    _, params, history, _, allowed = choice
    found: list[int] = []
    if params.logit_bias:
        bias = _bias(params.logit_bias)
        used.append(bias)
        found += _ids(*bias)
    else:
        found += _NO_IDS
    if params.penalised:
        counted = history.counted()
        used.append(counted)
        found += _ids(counted.seen)
        found += _ids(counted.generated, counted.counts)
        found += _ids(counted.path)
    else:
        found += 3 * _NO_IDS
    if allowed is None and holds_back(params, history):
        held = _held(params.stop_ids)
        used.append(held)
        found += _ids(held)
    else:
        found += _NO_IDS
    return found


def _ids(ids: "array[int]", numbers: "array[float] | None" = None) -> tuple[int, int, int]:
    at, count = ids.buffer_info()
    return at, 0 if numbers is None else numbers.buffer_info()[0], count


@lru_cache(maxsize=64)
def _bias(logit_bias: tuple[tuple[int, float], ...]) -> "tuple[array[int], array[float]]":
    return array("q", [token for token, _ in logit_bias]), array("d", [bias for _, bias in logit_bias])


@lru_cache(maxsize=64)
def _held(stop_ids: tuple[int, ...]) -> "array[int]":
    return array("q", stop_ids)


@lru_cache(maxsize=64)
def _of_width(width: int) -> tuple[float, int]:
    """The most by which a sum over a row errs, as a share, and the least lead of strong noise."""
    return relative_error(width), max(strong_lead(width), LEAST_STRONG)
