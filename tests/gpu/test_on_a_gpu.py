"""How often a step waits for a real GPU. Needs a CUDA device and `TRITON_INTERPRET=0`."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from outrider.lm.graphs.backend_choice import use_graphs
from outrider.lm.graphs.capture import CudaGraphs
from outrider.lm.plan import SequenceRows
from outrider.lm.runner import PackedLM
from speculative.digest import RowAsk
from tests.lm.families import model_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "0", reason="TRITON_INTERPRET=0 is not set"),
]

STEPS = 10


@contextmanager
def waits() -> Iterator[list[str]]:
    """Notes each wait of the host for the device inside the context, as torch's debug mode reports it."""
    found: list[str] = []
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            yield found
            found += [str(each.message) for each in told if "synchroniz" in str(each.message)]
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_step_waits_for_the_device_once(family: str, temperature: float) -> None:
    lm = PackedLM(model_of(family).to("cuda"), kv_mb=8)
    use_graphs(lm, "triton", CudaGraphs())
    tables = [lm.table() for _ in range(3)]
    asks = [RowAsk(5, row, temperature) for row in range(4)]

    def step() -> None:
        rows = [SequenceRows(table, [1, 2, 3, 4], [-1, 0, 0, 1], range(4), lambda: asks) for table in tables]
        outcome = lm.forward(rows)
        for row in range(len(outcome)):
            outcome.digest(row).highest()
        for table in tables:
            table.commit([0, 2])
            table.drop_nodes()

    for _ in range(3):
        step()
    with waits() as found:
        for _ in range(STEPS):
            step()
    assert len(found) == STEPS, found
