"""The device that the stages measure, and the sizes that they measure it with."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from benchmarks.gpu_step import FULL, SMALL, BenchPlan
from benchmarks.shared.random_llama import (
    EIGHT_BILLION,
    ONE_BILLION,
    TINY,
    LlamaSize,
    TimedDevice,
    packed_llama,
    random_llama,
)
from outrider.lm.runner import PackedLM


@dataclass(frozen=True)
class Machine:
    """A device, whether everything is tiny, and the folder of the run.

    Args:
        name: the torch device.
        tiny: tiny models and few repeats.
        out: folder of the run.
    """

    name: str
    tiny: bool
    out: Path

    @cached_property
    def device(self) -> TimedDevice:
        """The device's clock."""
        torch.set_num_threads(1)
        torch.set_float32_matmul_precision("highest")
        return TimedDevice(self.name)

    @property
    def repeats(self) -> int:
        """Repeats of each measurement."""
        return 1 if self.tiny else 20

    @property
    def dtype(self) -> torch.dtype:
        """The models' dtype."""
        return torch.bfloat16

    @property
    def plan(self) -> BenchPlan:
        """Batches and trees of the steps."""
        return SMALL if self.tiny else FULL

    @property
    def eight(self) -> LlamaSize:
        """Dimensions of the 8B-shaped model."""
        return TINY if self.tiny else EIGHT_BILLION

    @property
    def one(self) -> LlamaSize:
        """Dimensions of the 1B-shaped model."""
        return TINY if self.tiny else ONE_BILLION

    def model(self, size: LlamaSize, tokens: int, longest: int = 16384) -> PackedLM:
        """A random model with room for the keys and values of ``tokens`` tokens."""
        return packed_llama(random_llama(size, self.name, self.dtype, longest=longest), size, tokens)

    def memory_mb(self) -> int:
        """Memory that torch holds on the device, in MiB; 0 on a CPU."""
        return torch.cuda.memory_reserved(self.name) // 2**20 if self.device.is_gpu else 0
