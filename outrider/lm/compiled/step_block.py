"""The step block: what the attention operator of a compiled pass reads, as one array of int64 words.

    word 0          number of sessions
    word 1          where the planes are, 4 words each: address, and numbers between two heads; of int8 also
                    the scales' address, and scales between two heads; of floats 0 and 0
    word 2          where the sessions are, 8 words each: first row, row behind the last, committed length,
                    nodes, where the runs of slots are, their number, where the masks are, words of a mask
    word 3 + i      where the depths of session i's nodes are

A run is two words, its first slot and the slot behind its last. A mask has a bit for each node that the row
sees. `kernels.cpp` reads the same layout. Pure but for addresses.
"""

from array import array
from collections.abc import Sequence
from typing import Any

import torch

from outrider.lm.kv.int8_plane import Int8Plane
from outrider.lm.plan import PackedRows

_HEAD = 3
_SESSION = 8
_MASK_BITS = 64


def plane_words(planes: Sequence[torch.Tensor]) -> list[int]:
    """Where each plane ``[heads, slots, width]`` lies, float32 or an `Int8Plane`: four words a plane."""
    words: list[int] = []
    for plane in planes:
        kept: Any = plane
        scaled = isinstance(kept, Int8Plane)
        tensors = (kept.codes, kept.scales) if scaled else (kept,)
        for tensor in tensors:
            words += (tensor.data_ptr(), tensor.stride(0))
        words += () if scaled else (0, 0)
    return words


def step_block(rows: Sequence[PackedRows], planes: list[int]) -> torch.Tensor:
    """The step block of a pass, int64 ``[words]``; ``planes`` are the words of `plane_words`."""
    count = len(rows)
    at_planes = _HEAD + count
    at_sessions = at_planes + len(planes)
    sessions: list[int] = []
    depths_at: list[int] = []
    rest = array("q")
    at_rest = at_sessions + _SESSION * count
    for each in rows:
        nodes = len(each.parents)
        runs = each.table.all_runs
        words = -(-nodes // _MASK_BITS)
        depths_at.append(at_rest + len(rest))
        rest.extend(each.depths)
        sessions += (each.low, each.high, each.table.length, nodes, at_rest + len(rest), len(runs))
        for run in runs:
            rest.extend(run)
        sessions += (at_rest + len(rest), words)
        rest.frombytes(each.ancestor_bytes(8 * words))
    words_before = array("q", [count, at_planes, at_sessions, *depths_at, *planes, *sessions])
    return torch.frombuffer(words_before + rest, dtype=torch.int64)
