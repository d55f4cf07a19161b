"""LLMCad: a target whose weights are read from storage for every pass, beside a small model in memory.

Reading takes as long for a tree as for one row. So the most that drafts can bring is the tokens that a pass
commits with a tree of any size, if the small model costs nothing.
"""

import os
import time
from pathlib import Path
from typing import Any

from benchmarks.experiments.pair import ModelPair, Scale
from benchmarks.experiments.tree_memory import rows_per_accepted
from benchmarks.shared.bandwidth import read_seconds

NODES = (16, 64, 256)
_MIB = 2**20


def read_mb_per_second(folder: Path, size_mb: int) -> float:
    """MiB per second at which a file in the folder is read that is not in memory; the median of three."""
    path = folder / f"streamed-{os.getpid()}"
    try:
        with path.open("wb") as file:
            for _ in range(size_mb):
                file.write(os.urandom(_MIB))
            file.flush()
            os.fsync(file.fileno())
        return sorted(_read(path, size_mb) for _ in range(3))[1]
    finally:
        path.unlink(missing_ok=True)


def _read(path: Path, size_mb: int) -> float:
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        began = time.perf_counter()
        while file.read(_MIB):
            pass
        return size_mb / (time.perf_counter() - began)


def bound(target: Path, drafter: Path, scale: Scale, folder: Path, size_mb: int) -> dict[str, Any]:
    """Tokens of a pass by nodes, and how much longer reading takes from storage than from memory."""
    pair = ModelPair(target, drafter, scale)
    tokens = {str(nodes): rows_per_accepted(pair, nodes)["acceptance_length"] for nodes in NODES}
    stored = read_mb_per_second(folder, size_mb)
    memory = size_mb / read_seconds(size_mb * _MIB)
    return {
        "tokens_per_pass": tokens,
        "storage_mb_per_second": round(stored, 1),
        "memory_mb_per_second": round(memory, 1),
        "memory_over_storage": round(memory / stored, 2),
        "seconds_per_pass_of_7b_in_4_bits": round(3.5e9 / _MIB / stored, 2),
    }
