"""What a step asks of a GPU, counted over fake CUDA tensors: launches, bytes, and no read on the host."""

from collections.abc import Callable

import pytest
import torch
from transformers import LlamaConfig

from benchmarks.gpu_step import Roofline
from benchmarks.shared.random_llama import EIGHT_BILLION, LlamaSize
from outrider.lm.device.layout import MOST_BYTES
from outrider.lm.plan import SequenceRows
from speculative.digest import RowAsk
from tests.gpu.fake_cuda import FakeModel, Work
from tests.lm.families import config_of

LAUNCHES = {
    "llama": 24,
    "qwen3": 26,
    "mistral": 24,
    "gemma3_text": 70,
    "gemma2": 54,
    "gpt_neox": 27,
    "gpt2": 22,
    "deepseek_v3": 68,
    "gpt_oss": 52,
}
"""Launches of one layer, attention's two among them; a compiled layer launches fewer."""
BESIDE_LAYERS = 31
"""Most launches of a greedy step outside the layers: embedding, positions, last norm, head and digest."""
RATES = (4.3e12, 790e12)
"""Bytes and bfloat16 operations per second of an H200."""

Fake = Callable[..., FakeModel]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    return lambda config, **named: FakeModel(config, monkeypatch, **named)


def step(model: FakeModel, sessions: int, rows: int, ask: RowAsk, context: int = 0) -> Work:
    """Counts of what a second step of its size asks of the device."""
    tables = [model.lm.table(reserve=context) for _ in range(sessions)]
    for table in tables:
        table.length = context
    given = [
        SequenceRows(table, [1] * rows, range(-1, rows - 1), range(rows), lambda: [ask] * rows)
        for table in tables
    ]
    for _ in range(2):
        with model.counting() as work:
            model.lm.forward(given)
        for table in tables:
            table.drop_nodes()
    for table in tables:
        model.lm.release(table)
    return work


@pytest.mark.parametrize("family", LAUNCHES)
def test_a_step_reads_nothing_on_the_host_and_launches_few_kernels_a_layer(family: str, fake: Fake) -> None:
    works = []
    for layers in (2, 3):
        model = fake(config_of(family, num_hidden_layers=layers, layer_types=None))
        works.append(step(model, 3, 5, RowAsk()))

    launches = [work.launches.total() for work in works]
    print(f"{family}: {launches[1] - launches[0]} launches a layer, {launches[0]} of two layers and the rest")
    assert launches[1] - launches[0] <= LAUNCHES[family]
    assert launches[0] - 2 * (launches[1] - launches[0]) <= BESIDE_LAYERS
    assert works[0].between == []
    assert [len(works[0].up), len(works[0].down)] == [1, 1]


@pytest.mark.parametrize("ask", [RowAsk(), RowAsk(named=(3,)), RowAsk(7, 40, 0.8)])
def test_a_row_costs_at_most_a_page_of_its_digest_on_the_way_to_the_host(ask: RowAsk, fake: Fake) -> None:
    model = fake(llama(EIGHT_BILLION, layers=1))

    work = step(model, 2, 33, ask, context=1024)

    assert sum(work.down) <= MOST_BYTES * 66
    assert sum(work.up) <= 640 * 2**10
    assert work.between == []
    print(f"{ask}: {work.launches.total()} launches, {sum(work.down)} bytes down, {work.up} up")


@pytest.mark.parametrize(("sessions", "rows"), [(1, 1), (1, 33), (8, 33), (32, 33)])
def test_a_step_of_an_8b_moves_and_multiplies_little_beyond_its_floor(
    sessions: int, rows: int, fake: Fake
) -> None:
    """Prints launches and times beside the floor on an H200; `pytest -rP` shows what tests print."""
    model = fake(llama(EIGHT_BILLION, layers=4), tokens=64 * 1024)
    size = LlamaSize(4096, 4, 32, 8, 14336, 128256)
    work = step(model, sessions, rows, RowAsk(), context=1024)
    seen = sessions * (1024 + rows) * size.token_values * 2
    floor = Roofline(size, 2, *RATES).floor([1024] * sessions, [rows] * sessions)

    moved_ms = (work.bytes + seen) / RATES[0] * 1e3
    print(
        f"{sessions} x {rows}, 4 layers: {work.launches.total()} launches, {moved_ms:.3f} ms for bytes "
        f"({floor.bytes_ms:.3f} at least), {work.operations / RATES[1] * 1e3:.3f} ms for products "
        f"({floor.arithmetic_ms:.3f} at least)"
    )
    # Padding to the next size, and attention's products, which the kernel that stands in does not count.
    assert work.operations / RATES[1] * 1e3 <= 1.6 * floor.arithmetic_ms + 0.002
    few = sessions * rows <= 64
    assert moved_ms <= (1.2 if few else 5) * floor.bytes_ms


def llama(size: LlamaSize, layers: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.key_heads,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
    )


def test_a_read_on_the_host_would_be_found(fake: Fake) -> None:
    model = fake(config_of("llama"))
    own = model.lm.run_on_device

    def reading(*given: object) -> torch.Tensor:
        logits = own(*given)  # type: ignore[arg-type]
        return logits * float(logits.abs().max())

    model.steps._run = reading  # type: ignore[assignment]
    with pytest.raises(Exception, match=r"_local_scalar_dense|not linked with support for cuda"):
        step(model, 1, 1, RowAsk())
