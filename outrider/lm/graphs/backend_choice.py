"""Chooses how a model's passes run: ragged, or as steps of static shape captured as graphs.

On the CPU passes are ragged. On a GPU they are steps of static shape with the Triton kernel, where the kernel
passes the check at load. The caller chooses whether a model that cannot run so is refused
(`outrider.lm.device.placement.GpuOptions`).
"""

import logging
import time
from collections.abc import Callable
from importlib.util import find_spec
from statistics import median
from typing import TYPE_CHECKING

import torch

from outrider.lm.attention.metadata import Attend, WriteRows
from outrider.lm.graphs.capture import Capture, CudaGraphs, eager
from outrider.lm.graphs.graph_runner import GraphRunner, write_indexed
from outrider.lm.load.source import first_line
from outrider.lm.plan import SequenceRows
from speculative.errors import ModelRefused
from speculative.implementations import load_implementation

if TYPE_CHECKING:
    from outrider.lm.load.check import Trial
    from outrider.lm.runner import PackedLM

log = logging.getLogger(__name__)

KERNELS = {
    "gathered": "outrider.lm.attention.kernels.gathered:attend_gathered",
    "triton": "outrider.lm.attention.kernels.tree_attention:attend_tiles",
}
"""Attention kernels of a step by name, for `speculative.implementations.load_implementation`."""

_WRITERS = {"triton": "outrider.lm.attention.kernels.int8_rows:write_rows"}
"""For kernels that have a writer of keys and values of their own: the writer, by the kernel's name."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SHAPES = ((1, 1), (1, 8), (4, 1), (4, 16))
"""Step sizes that are timed: number of sessions, rows of each session."""

_CONTEXT = 1024
_CHUNK = 512
_WARM_UP, _REPEATS = 2, 7


def use_graphs(lm: "PackedLM", kernel: str, capture: Capture = eager) -> GraphRunner:
    """Makes the model's passes run with static shapes where they fit, with the attention kernel named.

    Raises ImportError for the Triton kernel where Triton is not installed.
    """
    attend: Attend = load_implementation(KERNELS, kernel)
    write: WriteRows = load_implementation(_WRITERS, kernel) if kernel in _WRITERS else write_indexed
    lm.steps = GraphRunner(
        lm.run_on_device,
        lm.model_type,
        lm.pool,
        windows=lm.windows,
        groups=lm.groups,
        max_length=lm.max_length,
        vocabulary_size=lm.vocabulary_size,
        dtype=lm.logits_dtype,
        taps=lm.taps,
        digester=lm.digester,
        attend=attend,
        write=write,
        capture=capture,
        max_rows=lm.gpu.max_rows,
    )
    return lm.steps


def use_ragged(lm: "PackedLM") -> None:
    """Makes all of the model's passes ragged: tensor shapes follow the sessions of each pass."""
    lm.steps = None
    lm.pool.settle()
    lm.pool.deferred = None


def choose_backend(lm: "PackedLM", trial: "Trial | None") -> None:
    """Chooses between ragged passes and static steps for a model that passed ``trial``, the check at load.

    Raises ModelRefused where graphs are required and the model cannot run as graphs.
    """
    mode = lm.gpu.cuda_graphs
    if lm.pool.layout.device.type != "cuda" or mode == "off":
        return
    if mode == "require":
        require_graphs(lm, trial, "triton", CudaGraphs())
    elif lacking := _lacking(lm):
        log.warning("passes are ragged, which is slow on a GPU: %s", lacking)
    else:
        compare_backends(lm, trial, "triton", CudaGraphs())


def require_graphs(lm: "PackedLM", trial: "Trial | None", kernel: str, capture: Capture) -> None:
    """Makes passes static steps. Raises ModelRefused where they fail, are wrong, or cannot be captured."""
    why = _lacking(lm) if kernel == "triton" else ""
    if not why:
        try:
            use_graphs(lm, kernel, capture)
            if trial is not None:
                trial.verify(lm)
            why = capture.refusal if isinstance(capture, CudaGraphs) else ""
        except Exception as error:
            # Errors of compilers and drivers have no common class.
            why = f"{type(error).__name__}: {first_line(error)}"
    if why:
        use_ragged(lm)
        raise ModelRefused(
            f"{lm.model_type} is not served: its passes cannot run as CUDA graphs ({why}); "
            "cuda_graphs = prefer serves it several times slower",
            lm.model_type,
        )


def compare_backends(lm: "PackedLM", trial: "Trial | None", kernel: str, capture: Capture) -> None:
    """Times small steps both ways and leaves the model on the faster way.

    Passes stay ragged where static steps fail, or differ from the model's own forward.
    """
    ragged_ms = step_ms(lm)
    try:
        use_graphs(lm, kernel, capture)
        if trial is not None:
            trial.verify(lm)
        static_ms = step_ms(lm)
    except Exception as error:
        # As above; ragged passes need neither compiler nor graphs.
        use_ragged(lm)
        log.warning("passes are ragged: steps of static shape fail with %s", error)
        return
    if sum(static_ms.values()) >= sum(ragged_ms.values()):
        use_ragged(lm)
    named = {"static": static_ms, "ragged": ragged_ms, "chosen": "ragged" if lm.steps is None else "static"}
    log.info("ways of a step were measured", extra={"fields": named})


def _lacking(lm: "PackedLM") -> str:
    """What is missing for static steps on a GPU; empty where nothing is."""
    if lm.pool.layout.dtype not in _DTYPES:
        return f"the kernel does not compute in {str(lm.pool.layout.dtype).removeprefix('torch.')}"
    return "" if find_spec("triton") else "Triton is not installed; a CUDA build of torch brings it"


def step_ms(lm: "PackedLM") -> dict[str, float]:
    """Median duration of small steps in milliseconds, by "sessions x rows of each session".

    Sizes for which the pool has no room are left out.
    """
    calls, rows_before = lm.forward_calls, lm.rows
    most = max(sessions for sessions, _ in _SHAPES)
    room = min(lm.max_length, lm.pool.max_slots // most)
    context = min(_CONTEXT, room // 2)
    tables = [lm.table() for _ in range(most)]
    try:
        for table in tables:
            for low in range(0, context, _CHUNK):
                count = min(_CHUNK, context - low)
                lm.forward([SequenceRows(table, (0,) * count, range(-1, count - 1), ())])
                table.commit(range(count))

        def once(sessions: int, rows: int) -> Callable[[], None]:
            tree = [(row + 1) // 2 - 1 for row in range(rows)]
            sequences = [SequenceRows(table, (0,) * rows, tree, range(rows)) for table in tables[:sessions]]

            def step() -> None:
                lm.forward(sequences)
                for table in tables[:sessions]:
                    table.drop_nodes()

            return step

        fitting = [(sessions, rows) for sessions, rows in _SHAPES if rows <= room - context]
        return {f"{sessions}x{rows}": _median_ms(once(sessions, rows)) for sessions, rows in fitting}
    finally:
        lm.forward_calls, lm.rows = calls, rows_before
        for table in tables:
            lm.release(table)


def _median_ms(once: Callable[[], None]) -> float:
    times = []
    for turn in range(_WARM_UP + _REPEATS):
        began = time.perf_counter()
        once()
        if turn >= _WARM_UP:
            times.append((time.perf_counter() - began) * 1000)
    return round(median(times), 3)
