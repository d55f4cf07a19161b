"""Has a process whose passes are eager choose tokens by the compiled kernel, too.

A kernel in the cache is used at once. Otherwise a thread has it compiled beside serving, and NumPy chooses
until then; tokens are the same either way.
"""

import tempfile
import threading
from pathlib import Path

import torch

from outrider.lm.compiled.row_kernel import use_row_kernel
from speculative.sampling_kernel import current_kernel


class KernelBuilder:
    """Gets the kernel of chosen tokens from the cache, or compiles it in a thread of its own.

    Args:
        cache_dir: folder that keeps the kernel for later processes; None: compile it for this process alone.
    """

    def __init__(self, cache_dir: Path | None) -> None:
        self._cache_dir = cache_dir
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._build, name="compile kernel", daemon=True)

    @classmethod
    def beside(cls, device: torch.device, cache_dir: Path | None) -> "KernelBuilder | None":
        """A builder that has started; None where logits do not lie in the host's memory."""
        if device.type != "cpu":
            return None
        builder = cls(cache_dir)
        builder.start()
        return builder

    def start(self) -> None:
        """Uses a kernel of the cache now, and has one compiled where the cache has none."""
        if self._cache_dir is not None:
            use_row_kernel(self._cache_dir, self._stop.is_set, compiles=False)
        if current_kernel() is None:
            self._thread.start()

    def close(self) -> None:
        """Ends compiling; blocks until the compiler is gone."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _build(self) -> None:
        if self._cache_dir is not None:
            use_row_kernel(self._cache_dir, self._stop.is_set)
            return
        with tempfile.TemporaryDirectory(prefix="outrider-kernel-") as folder:
            use_row_kernel(Path(folder), self._stop.is_set)
