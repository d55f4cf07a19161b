"""How much of a GPU the keys and values get: what is left after the weights and the largest step.

`kv_bytes` is the rule; `fit_pool` measures what the rule needs.
"""

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from outrider.lm.attention.shapes import BUCKETS
from outrider.lm.device.placement import CPU_KV_MB
from outrider.lm.kv.pool import KVLayout, SlotPool
from outrider.lm.plan import SequenceRows
from speculative.digest import RowAsk

if TYPE_CHECKING:
    from outrider.lm.runner import PackedLM

log = logging.getLogger(__name__)

_TREE_ROWS = 64
"""Number of rows of each session in the largest step."""

_FOREIGN_BYTES = 2**30
"""Memory that a GPU's driver and contexts may take before other processes are suspected to use the GPU."""


def first_pool(layout: KVLayout, kv_mb: int | None) -> SlotPool:
    """The pool of ``kv_mb`` MiB; None: CPU_KV_MB, and on a GPU what is free now, until `fit_pool`."""
    if layout.device.type == "cpu":
        return SlotPool(layout, (CPU_KV_MB if kv_mb is None else kv_mb) * 2**20 // layout.slot_bytes)
    if kv_mb is None:
        return SlotPool(layout, torch.cuda.mem_get_info(layout.device)[0] // layout.slot_bytes)
    # All storage exists from the start: growing would move the memory that captured graphs read.
    slots = kv_mb * 2**20 // layout.slot_bytes
    return SlotPool(layout, slots, initial_slots=slots)


def kv_bytes(total: int, free: int, own: int, step: int, share: float) -> int:
    """Size of the keys and values that a process may have on its GPU, in bytes; 0 where nothing is left.

    Args:
        total: size of the GPU's memory.
        free: size of the part that no process has taken.
        own: size of the part that this process has taken, weights and captured steps among it.
        step: memory that the largest step takes while it runs; a step captured later takes it again.
        share: part of the whole memory that the process may take.
    """
    return max(0, min(free, int(share * total) - own) - step)


def fit_pool(lm: "PackedLM", agreed: Callable[[int], int]) -> None:
    """Gives the model's pool the memory of its GPU that is left after a trial of the largest step.

    ``agreed`` takes a number of slots and returns the number that all ranks can have.
    """
    device, pool = lm.pool.layout.device, lm.pool
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run_largest(lm)
    step = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    own = torch.cuda.memory_reserved(device)
    _warn_of_others(total - free - own)
    room = kv_bytes(total, free, own, step, lm.gpu.memory_utilization)
    pool.fit(agreed(room // pool.layout.slot_bytes))


def run_largest(lm: "PackedLM") -> None:
    """Runs one pass of as many rows as a step may have, all of them wanted and sampled."""
    counters = lm.forward_calls, lm.rows
    most = min(lm.gpu.max_rows, BUCKETS[-1])
    each = min(_TREE_ROWS, most)
    asks = [RowAsk(temperature=1.0)] * each
    tables = [lm.table() for _ in range(most // each)]
    try:
        lm.forward(
            [SequenceRows(table, (0,) * each, (-1,) * each, range(each), lambda: asks) for table in tables]
        )
    finally:
        lm.forward_calls, lm.rows = counters
        for table in tables:
            lm.release(table)


def chosen(lm: "PackedLM") -> dict[str, object]:
    """What loading has chosen, for a log: device, dtype, memory for keys and values, how passes run."""
    device, pool = lm.pool.layout.device, lm.pool
    gpu = {"gpu": torch.cuda.get_device_name(device)} if device.type == "cuda" else {}
    return {
        "device": str(device),
        **gpu,
        "dtype": str(lm.model.dtype).removeprefix("torch."),
        "kv_mb": pool.max_slots * pool.layout.slot_bytes // 2**20,
        "kv_tokens": pool.max_slots,
        "passes": lm.passes,
    }


def _warn_of_others(foreign: int) -> None:
    """Says that processes without MPS take turns on a GPU, where others have ``foreign`` bytes of it."""
    if foreign > _FOREIGN_BYTES and "CUDA_MPS_PIPE_DIRECTORY" not in os.environ:
        log.warning(
            "other processes use %.1f GiB of this GPU, and without NVIDIA's MPS, processes take turns: a "
            "drafter's passes delay its target's steps; give each a GPU of its own, or start MPS",
            foreign / 2**30,
        )
