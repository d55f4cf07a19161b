"""Running a step that reads and writes the same memory every time: as it is, or as a captured CUDA graph."""

import logging
from collections.abc import Callable

import torch

log = logging.getLogger(__name__)

Run = Callable[[], None]
Capture = Callable[[Run], Run]
"""From what a step does to something that does it again, over whatever its inputs hold then."""


def eager(run: Run) -> Run:
    """The step itself, launched piece by piece."""
    return run


class CudaGraphs:
    """Captures steps as graphs that share one pool of memory: they never run at the same time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Run) -> Run:
        """Runs the step, so that kernels are compiled and libraries ready, then captures it.

        A step that cannot be captured (one that reads a result on the host to go on) stays as it is.
        """
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()
            run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            # Only this thread's calls are captured; others of the process go on as they are.
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
