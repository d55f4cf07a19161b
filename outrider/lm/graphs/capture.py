"""Runs a step that reads and writes the same memory every time: eagerly, or as a captured CUDA graph."""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

log = logging.getLogger(__name__)

Run = Callable[[], None]
"""Runs one step over the current contents of its inputs."""
Capture = Callable[[Run], Run]
"""Turns a step into a callable that repeats it, over the contents of its inputs at that time."""


def eager(run: Run) -> Run:
    """A Capture that leaves the step as it is, launched operation by operation."""
    return run


class CudaGraphs:
    """A Capture that makes CUDA graphs. They share one memory pool, so no two may run at the same time.

    The first step decides: where it reads a result on the host, or cannot be captured, no step is captured
    from then on, as a failed capture can leave torch's allocator in a broken state.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._is_tried = False
        self.refusal = ""
        """Why steps are launched operation by operation; empty: they are captured."""

    def __call__(self, run: Run) -> Run:
        """Runs the step twice, so that kernels are compiled and libraries ready, then captures it.

        Raises torch.OutOfMemoryError.
        """
        if self.refusal:
            return run
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(side):
                run()
                with _host_reads_refused(not self._is_tried):
                    run()
            torch.cuda.current_stream().wait_stream(side)
            self._is_tried = True
            # Only calls of this thread are captured; other threads of the process go on undisturbed.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                run()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            torch.cuda.synchronize()
            self.refusal = str(error).partition("\n")[0]
            log.warning("steps are launched operation by operation, not as graphs: %s", self.refusal)
            return run
        replay: Run = graph.replay
        return replay


@contextmanager
def _host_reads_refused(refused: bool) -> Iterator[None]:
    """Makes operations raise that wait for the device, such as reads of a result on the host.

    The mode is the whole process's, so only for use before anything is served.
    """
    before = torch.cuda.get_sync_debug_mode()
    if refused:
        with warnings.catch_warnings():
            # Torch says of the mode that it is a prototype, which does not concern the operator of a service.
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
