"""The compiled passes of a drafting head of one layer: the calls of the kernel.

One call writes the pairs of committed tokens into planes of the target's pool, another computes one level of
drafts and ranks what follows. `head_kernel.cpp` has the arithmetic and the structs that are packed here; it
reads addresses unchecked.
"""

import ctypes
import struct
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.lm.compiled.head_weights import PackedHead
from outrider.lm.compiled.torch_library import torch_library
from outrider.lm.heads.pair_head import PairHead
from outrider.lm.kv.pool import Run
from speculative.errors import EmptySupport

HEAD_LIBRARY = torch_library("head_kernel")
_FEW = 16
"""The most pairs that are written without handing the interpreter to other threads: to write these takes
less time than to get the interpreter back."""

_COMMITTED = 5
"""Words of a struct Committed."""
_DRAFTING = struct.Struct("<12q2fq")
_LEVEL = struct.Struct("<9q")
_PLANES = struct.Struct("<4q")
_NO_NUMBER = 2
"""What the kernel returns where the largest score of a row is no number."""

Children = list[tuple[int, float]]
Logits = NDArray[np.float32]


class Ranking(NamedTuple):
    """What the kernel ranks the children of one session's nodes by; see `speculative.level_ranking`."""

    leads: NDArray[np.uint16] | None
    """Leading bits of the noise of each id; None: the request is greedy."""
    temperature: float
    scale: float
    most: int
    """Most children of one node, the same for all sessions of a call."""


class DraftRows(NamedTuple):
    """The rows that one session has in a level."""

    memory: "DraftMemory"
    tokens: Sequence[int]
    parents: Sequence[int]
    """For each row the row of an earlier level that it continues, counted over all levels; -1: none."""
    position: int
    """Rotary position of the rows."""
    ranking: Ranking | None
    """None: the logits are wanted instead."""
    least: Sequence[float]
    """For each row, the probability below which a token is no child."""


class DraftMemory:
    """What one draft keeps from level to level: keys, values and expected hidden states of its rows.

    Args:
        head: whose draft it is.
        runs: runs of slots of the session's committed tokens but the last; the very first slot has no pair.
        before: the target's hidden states of the position before the last committed token, float32
            ``[layers, width]``.
        rows: most rows of the draft.
    """

    def __init__(self, head: "CompiledHead", runs: Sequence[Run], before: Tensor, rows: int) -> None:
        if before.dtype is not torch.float32 or before.stride(-1) != 1:
            raise ValueError(f"hidden states are {before.dtype} with strides {before.stride()}")
        self.runs = array("q", [slot for run in runs for slot in run])
        self.before = before
        self.parents = array("q")
        self.room = rows
        self.rows = np.empty((rows, head.row_width), np.float32)
        self.fixed = (before.data_ptr(), before.stride(0), self.runs.buffer_info()[0], len(runs))


class HeadKernel:
    """The kernel in a library."""

    def __init__(self, library: Path) -> None:
        # Short calls keep the interpreter: another thread that took it would hold up the engine's.
        quick, loaded = ctypes.PyDLL(str(library)), ctypes.CDLL(str(library))
        self.width = int(loaded.outrider_panel_width())
        """Number of outputs of a panel."""
        self.write_few, self.write_many = (of.outrider_head_write for of in (quick, loaded))
        for write in (self.write_few, self.write_many):
            write.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int64, ctypes.c_void_p)
            write.restype = ctypes.c_int64
        self.level = loaded.outrider_head_level
        self.level.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p)
        self.level.restype = ctypes.c_int64


class CompiledHead:
    """A head whose passes the kernel computes; one thread at a time may call it.

    Args:
        kernel: the kernel.
        head: the head, float32 on the CPU.
        vocabulary_size: number of the target's ids.

    Raises:
        NeverCompiled: the head has a part that the kernel does not compute.
    """

    def __init__(self, kernel: HeadKernel, head: PairHead, vocabulary_size: int) -> None:
        self._kernel = kernel
        self._packed = PackedHead(head, vocabulary_size, kernel.width)
        sizes = self._packed.struct
        self._address = ctypes.addressof(sizes)
        self._vocabulary_size = vocabulary_size
        self.key_heads = int(sizes.key_heads)
        self.feature_shape = int(sizes.layers), int(sizes.feature_width)
        """Layers and width of the hidden states that the head reads of one position."""
        self.row_width = int(2 * sizes.key_heads * sizes.head_dim + sizes.width)
        """Numbers that a draft keeps of one row."""
        self._logits: Logits = np.empty((0, vocabulary_size), np.float32)

    def write(self, planes: Sequence[Tensor], pairs: "array[int]") -> None:
        """Writes the pairs of committed tokens.

        Args:
            planes: keys and values, ``[key heads, slots, head_dim]`` each.
            pairs: five numbers for each token: its id, the rotary position of its pair, its slot, the
                address of the target's hidden states of the position before, and the floats between two
                layers there.
        """
        count, slots = len(pairs) // _COMMITTED, planes[0].shape[1]
        self._check_ids(pairs[::_COMMITTED])
        if count and not 0 <= min(pairs[2::_COMMITTED]) <= max(pairs[2::_COMMITTED]) < slots:
            raise ValueError(f"a pair goes to slot {max(pairs[2::_COMMITTED])} of {slots}")
        write = self._kernel.write_few if count <= _FEW else self._kernel.write_many
        if write(self._address, _planes(planes), count, pairs.buffer_info()[0]):
            raise RuntimeError("the compiled head failed to write pairs")

    def level(self, planes: Sequence[Tensor], drafts: Sequence[DraftRows]) -> list[list[Children] | Logits]:
        """Computes one level of some drafts.

        Args:
            planes: keys and values, ``[key heads, slots, head_dim]`` each.
            drafts: the rows of each session.

        Returns:
            For each session the children of each row, or, where nothing ranks them, the logits
            ``[rows, vocabulary]``, valid until the next call.

        Raises:
            EmptySupport: NaN among the logits.
        """
        rows = sum(len(draft.tokens) for draft in drafts)
        most = next((draft.ranking.most for draft in drafts if draft.ranking), 1)
        tokens = array("q", [token for draft in drafts for token in draft.tokens])
        self._check_ids(tokens)
        least = array("d", [each for draft in drafts for each in draft.least])
        if len(self._logits) < rows:
            self._logits = np.empty((rows, self._vocabulary_size), np.float32)
        children, shares = array("q", bytes(8 * rows * most)), array("d", bytes(8 * rows * most))
        counts = array("q", bytes(8 * rows))
        drafting = b"".join(self._drafting(drafts))
        level = _LEVEL.pack(
            len(drafts),
            rows,
            _bytes_at(drafting),
            tokens.buffer_info()[0],
            least.buffer_info()[0],
            _address(self._logits),
            children.buffer_info()[0],
            shares.buffer_info()[0],
            counts.buffer_info()[0],
        )
        failed = self._kernel.level(self._address, _planes(planes), level)
        if failed == _NO_NUMBER:
            raise EmptySupport(f"the largest of the head's {self._vocabulary_size} logits is nan or infinite")
        if failed:
            raise RuntimeError("the compiled head failed to compute a level")
        return self._found(drafts, most, counts, children, shares)

    def _check_ids(self, ids: "array[int]") -> None:
        """Raises ValueError for an id without embedding, which the kernel would read unchecked."""
        if ids and not 0 <= min(ids) <= max(ids) < self._vocabulary_size:
            raise ValueError(f"the head has no token {max(ids)}; its ids end at {self._vocabulary_size - 1}")

    def _drafting(self, drafts: Sequence[DraftRows]) -> Sequence[bytes]:
        """The struct Drafting of each session."""
        first, packed = 0, []
        for draft in drafts:
            memory, ranking, count = draft.memory, draft.ranking, len(draft.tokens)
            known = len(memory.parents)
            if known + count > memory.room:
                raise ValueError(f"a draft of {known + count} rows has room for {memory.room}")
            memory.parents.extend(draft.parents)
            leads, temperature, scale, most = ranking or (None, 0.0, 1.0, 1)
            if leads is not None and (len(leads) < self._vocabulary_size or leads.dtype != np.uint16):
                raise ValueError(f"the noise has {len(leads)} {leads.dtype} leads")
            packed.append(
                _DRAFTING.pack(
                    *(first, count, known, draft.position, *memory.fixed),
                    *(_address(memory.rows), memory.parents.buffer_info()[0], ranking is not None),
                    *(0 if leads is None else _address(leads), temperature, scale, most),
                )
            )
            first += count
        return packed

    def _found(
        self,
        drafts: Sequence[DraftRows],
        most: int,
        counts: "array[int]",
        children: "array[int]",
        shares: "array[float]",
    ) -> list[list[Children] | Logits]:
        found: list[list[Children] | Logits] = []
        row = 0
        for draft in drafts:
            behind = row + len(draft.tokens)
            if draft.ranking is None:
                found.append(self._logits[row:behind])
            else:
                places = [(at * most, at * most + counts[at]) for at in range(row, behind)]
                found.append(
                    [list(zip(children[low:high], shares[low:high], strict=True)) for low, high in places]
                )
            row = behind
        return found


def _planes(planes: Sequence[Tensor]) -> bytes:
    """The struct Planes."""
    keys, values = planes
    return _PLANES.pack(keys.data_ptr(), keys.stride(0), values.data_ptr(), values.stride(0))


def _address(numbers: NDArray[Any]) -> int:
    return int(numbers.__array_interface__["data"][0])


def _bytes_at(packed: bytes) -> int:
    return ctypes.cast(ctypes.c_char_p(packed), ctypes.c_void_p).value or 0
