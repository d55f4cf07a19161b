"""What only a real GPU shows. Needs a CUDA device and `TRITON_INTERPRET=0`."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from outrider.lm.device.digest import REDUCTIONS, RowDigester
from outrider.lm.device.layout import Asks
from outrider.lm.device.outcome import DeviceOutcome
from outrider.lm.graphs import layer_compiler
from outrider.lm.graphs.backend_choice import use_graphs
from outrider.lm.graphs.capture import CudaGraphs
from outrider.lm.outcome import TransferCounts
from outrider.lm.plan import SequenceRows
from outrider.lm.runner import PackedLM
from speculative.choice import choose_token, row_ask
from speculative.digest import RowAsk
from speculative.history import History
from speculative.implementations import load_implementation
from speculative.noise import PositionNoise
from speculative.params import SamplingParams
from speculative.sampling import sample_token
from tests.lm.families import logits_of, model_of, twin_of

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocabulary_size", [1, 2049, 128_256])
def test_tokens_chosen_from_the_kernels_digests_are_the_rules(
    dtype: torch.dtype, vocabulary_size: int
) -> None:
    generator = torch.Generator().manual_seed(vocabulary_size)
    rows = (3 * torch.randn(9, vocabulary_size, generator=generator)).to(dtype)
    rows[3] = rows[3].round()  # ties
    rows[4, : vocabulary_size // 2] = float("-inf")
    reductions = load_implementation(REDUCTIONS, "triton")()
    digester = RowDigester(vocabulary_size, torch.device("cuda"), reductions=reductions)
    history, fetched = History.of([], 0), TransferCounts()
    for params in (
        SamplingParams(),
        SamplingParams(temperature=0.8),
        SamplingParams(temperature=0.8, top_p=0.9),
        SamplingParams(temperature=1.3, top_k=20),
    ):
        asks = Asks.of([row_ask(params, history, seed, 3, None) for seed in range(9)], digester.capacity, 0)
        words = torch.empty(9, 0, dtype=torch.int64) if asks.words is None else torch.from_numpy(asks.words)
        found = digester.compute(rows.cuda(), words.cuda(), asks.level).cpu().numpy()
        outcome = DeviceOutcome(rows.cuda(), None, found, asks, digester.capacity, fetched)
        for index in range(9):
            noise = PositionNoise(index, 3, vocabulary_size) if params.temperature else None
            drawn = None if noise is None else PositionNoise(index, 3, vocabulary_size).full()
            wanted = sample_token(rows[index].float().numpy(), params, history, drawn)
            assert choose_token(outcome.digest(index), params, history, noise) == wanted
    assert fetched.fetched_rows < 9, "most rows are decided by their digests"


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_layers_compiled_by_inductor_give_the_logits_of_ragged_passes(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter(({"1x1": 2.0}, {"1x1": 1.0}))
    monkeypatch.setattr(layer_compiler, "step_ms", lambda lm: next(times))
    model = model_of(family).to("cuda")
    static, ragged = PackedLM(twin_of(model), kv_mb=8), PackedLM(model, kv_mb=8)
    use_graphs(static, "triton", CudaGraphs())
    layer_compiler.compile_layers(static, None, "triton", CudaGraphs)
    assert static.steps is not None
    assert (static.steps.label, static.steps.are_graphs) == ("static-compiled", True)
    for count in (1, 3, 20):
        found = []
        for lm in (static, ragged):
            table = lm.table()
            prompt = [at % 50 for at in range(40)]
            lm.forward([SequenceRows(table, prompt, range(-1, 39), ())])
            table.commit(range(40))
            tree = [(row + 1) // 2 - 1 for row in range(count)]
            found.append(logits_of(lm, [SequenceRows(table, range(count), tree, range(count))]))
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
