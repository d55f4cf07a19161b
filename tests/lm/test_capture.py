"""When steps are captured as CUDA graphs, and when they are not; by a double of torch's CUDA functions."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import pytest
import torch

from outrider.lm.graphs import capture
from outrider.lm.graphs.capture import CudaGraphs


class FakeCuda:
    """Streams and graphs that do nothing, but for what a step does in them."""

    OutOfMemoryError = torch.OutOfMemoryError

    def __init__(self) -> None:
        self.mode = 0
        self.captures = 0
        self.replays = 0
        self.capture_error = ""

    def graph_pool_handle(self) -> int:
        return 1

    def Stream(self) -> "FakeCuda":
        return self

    current_stream = Stream

    def wait_stream(self, other: object) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def stream(self, stream: object) -> AbstractContextManager[None]:
        return nullcontext()

    def get_sync_debug_mode(self) -> int:
        return self.mode

    def set_sync_debug_mode(self, mode: int | str) -> None:
        self.mode = {"error": 2}.get(str(mode), 0)

    def CUDAGraph(self) -> "FakeCuda":
        return self

    def replay(self) -> None:
        self.replays += 1

    @contextmanager
    def graph(self, graph: object, pool: int, capture_error_mode: str) -> Iterator[None]:
        self.captures += 1
        yield
        if self.capture_error:
            raise RuntimeError(self.capture_error)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(capture.torch, "cuda", fake)
    return fake


def reading(cuda: FakeCuda) -> Callable[[], None]:
    """A step that reads a result on the host."""

    def run() -> None:
        if cuda.mode == 2:
            raise RuntimeError("called a synchronizing CUDA operation\nmore of it")

    return run


def test_a_step_is_replayed_as_a_graph(cuda: FakeCuda) -> None:
    graphs, runs = CudaGraphs(), []
    replay = graphs(lambda: runs.append(cuda.mode))
    replay()

    assert (cuda.captures, cuda.replays, graphs.refusal) == (1, 1, "")
    assert runs == [0, 2, 0], "twice to warm up, the second time without reads on the host, and once captured"
    graphs(lambda: runs.append(cuda.mode))
    assert runs[3:] == [0, 0, 0], "the mode is the whole process's, so only the first step is watched"


def test_a_model_that_reads_on_the_host_is_never_captured(
    cuda: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    graphs = CudaGraphs()
    runs = [reading(cuda) for _ in range(3)]

    assert [graphs(run) for run in runs] == runs
    assert (cuda.captures, cuda.mode) == (0, 0)
    assert graphs.refusal == "called a synchronizing CUDA operation"
    assert caplog.text.count("launched operation by operation") == 1


def test_one_failed_capture_is_the_last(cuda: FakeCuda) -> None:
    graphs = CudaGraphs()
    cuda.capture_error = "operation not permitted when stream is capturing"

    def run() -> None:
        pass

    assert graphs(run) is run
    assert graphs(run) is run
    assert (cuda.captures, graphs.refusal) == (1, cuda.capture_error)


def test_a_warm_up_without_memory_is_no_reason_to_give_graphs_up(cuda: FakeCuda) -> None:
    graphs = CudaGraphs()

    def full() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        graphs(full)
    assert (graphs.refusal, cuda.mode) == ("", 0)
