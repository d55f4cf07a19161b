"""Has a process whose passes are eager choose tokens by the compiled kernel, too.

Until the kernel is there, NumPy chooses; tokens are the same either way.
"""

from collections.abc import Callable
from pathlib import Path

import torch

from outrider.compiling.library_builder import LibraryBuilder
from outrider.lm.compiled.row_kernel import use_row_kernel
from speculative.sampling_kernel import current_kernel


class KernelBuilder(LibraryBuilder):
    """Gets the kernel of chosen tokens from the cache, or compiles it in a thread of its own.

    Args:
        cache_dir: folder that keeps the kernel for later processes; None: compile it for this process alone.
    """

    def __init__(self, cache_dir: Path | None) -> None:
        super().__init__(cache_dir, _use)

    @classmethod
    def beside(cls, device: torch.device, cache_dir: Path | None) -> "KernelBuilder | None":
        """A builder that has started; None where logits do not lie in the host's memory."""
        if device.type != "cpu":
            return None
        builder = cls(cache_dir)
        builder.start()
        return builder

    def start(self) -> None:
        """Uses a kernel of the cache now, and has one compiled where neither cache nor process has one."""
        if current_kernel() is None:
            super().start()


def _use(cache_dir: Path, is_stopped: Callable[[], bool], compiles: bool) -> bool:
    use_row_kernel(cache_dir, is_stopped, compiles)
    return current_kernel() is not None
