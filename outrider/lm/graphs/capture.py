"""Runs a step that reads and writes the same memory every time: eagerly, or as a captured CUDA graph."""

import logging
from collections.abc import Callable

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
    """A Capture that makes CUDA graphs. They share one memory pool, so no two may run at the same time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Run) -> Run:
        """Runs the step twice, so that kernels are compiled and libraries ready, then captures it.

        A step that cannot be captured, because it reads a result on the host to go on, stays eager.
        """
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()
            run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            # Only calls of this thread are captured; other threads of the process go on undisturbed.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                run()
        except RuntimeError as error:
            torch.cuda.synchronize()
            log.warning(
                "a step cannot be captured as a graph and is launched piece by piece: %s",
                str(error).partition("\n")[0],
            )
            return run
        replay: Run = graph.replay
        return replay
