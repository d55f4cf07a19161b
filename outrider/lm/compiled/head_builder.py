"""Has a head's passes compiled while the head serves, and checks them against the eager head before use.

Whatever goes wrong leaves the head eager, and one line in the log says why. Drafts are the same either way,
up to rounding.
"""

import logging
from collections.abc import Callable
from pathlib import Path

import torch

from outrider.compiling.library_builder import LibraryBuilder
from outrider.compiling.store import CompileFailed, NeverCompiled
from outrider.lm.compiled.head_check import check_head
from outrider.lm.compiled.head_kernel import HEAD_LIBRARY, CompiledHead, HeadKernel
from outrider.lm.heads.pair_head import PairHead

log = logging.getLogger(__name__)


class HeadBuilder(LibraryBuilder):
    """Gets the compiled passes of one head from the cache, or compiles them in a thread of its own.

    Args:
        head: the head, in its final dtype and on its device.
        vocabulary_size: number of the target's ids.
        cache_dir: folder that keeps the kernel for later processes; None: compile it for this process alone.
    """

    def __init__(self, head: PairHead, vocabulary_size: int, cache_dir: Path | None) -> None:
        super().__init__(cache_dir, self._use)
        self.ready: CompiledHead | None = None
        """The compiled head, once it is there and checked."""
        self._head, self._vocabulary_size = head, vocabulary_size

    def _use(self, cache_dir: Path, is_stopped: Callable[[], bool], compiles: bool) -> bool:
        try:
            self.ready = self._compiled(cache_dir, is_stopped, compiles)
        except NeverCompiled as error:
            log.info("the head stays eager: %s", error)
            return True  # compiling would not help
        except Exception as error:  # whatever it is, eager passes go on
            if not is_stopped():
                log.warning("the head stays eager: %s; compiled heads draft in a fraction of the time", error)
            return True
        return self.ready is not None

    def _compiled(
        self, cache_dir: Path, is_stopped: Callable[[], bool], compiles: bool
    ) -> CompiledHead | None:
        """The compiled head; None where the cache lacks the kernel and it is not to be compiled.

        Raises CompileFailed, and NeverCompiled for a head that is not compiled.
        """
        weight = self._head.layer.self_attn.q_proj.weight
        if weight.device.type != "cpu" or weight.dtype is not torch.float32:
            given = f"{str(weight.dtype).removeprefix('torch.')} on {weight.device.type}"
            raise NeverCompiled(f"heads are compiled in float32 on the CPU, not in {given}")
        library = HEAD_LIBRARY.find(cache_dir, is_stopped, compiles)
        if library is None:
            return None
        made = CompiledHead(HeadKernel(library), self._head, self._vocabulary_size)
        if (error := check_head(made, self._head, self._vocabulary_size)) is not None:
            raise CompileFailed(error)
        return made
