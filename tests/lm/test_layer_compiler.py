"""Layers compiled inside static steps: the same logits, or the layers as they were."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from outrider.lm.graphs import layer_compiler
from outrider.lm.graphs.backend_choice import use_graphs
from outrider.lm.graphs.capture import eager
from outrider.lm.graphs.layer_compiler import compile_layers
from outrider.lm.load.check import Trial
from outrider.lm.load.part import ModelPart
from outrider.lm.outcome import OutcomeWants
from outrider.lm.plan import SequenceRows
from outrider.lm.runner import PackedLM
from outrider.skip_set import read_skips
from tests.lm.families import model_of


@pytest.fixture(autouse=True)
def traced_anew() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def times(*given: float) -> Callable[[PackedLM], dict[str, float]]:
    """Stands in for the measurement of steps: what each call finds, in turn."""
    left = iter(given)
    return lambda lm: {"1x1": next(left)}


def steps_of(family: str, *skipped: str) -> tuple[PackedLM, Trial]:
    model = model_of(family, num_hidden_layers=3)
    ModelPart(read_skips(skipped)).apply(model)
    lm = PackedLM(model, kv_mb=8)
    trial = Trial.of(lm)
    use_graphs(lm, "gathered")
    return lm, trial


def logits(lm: PackedLM) -> list[np.ndarray]:
    """Logits of a prompt's last row, and of a tree below."""
    table = lm.table()
    prompt = lm.forward([SequenceRows(table, [3, 4, 5, 6], range(-1, 3), [3])]).rows().copy()
    table.commit(range(4))
    tree = lm.forward([SequenceRows(table, [7, 8, 9], [-1, 0, 0], [0, 1, 2])]).rows().copy()
    lm.release(table)
    return [prompt, tree]


def is_compiled(lm: PackedLM) -> bool:
    assert lm.steps is not None
    assert "forward" not in vars(lm.model.model.layers[0]), "compiled code runs inside steps alone"
    return lm.steps.label == "static-compiled"


@pytest.mark.slow
@pytest.mark.parametrize(
    "of",
    [("llama",), ("gemma2",), ("llama", "0.attention", "1.mlp")],
    ids=["llama", "gemma2", "part of llama"],
)
def test_compiled_layers_give_the_same_logits_for_steps_of_any_size(
    of: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_compiler, "step_ms", times(2.0, 1.0))
    lm, trial = steps_of(*of)
    before = logits(lm)
    compile_layers(lm, trial, "gathered", lambda: eager, backend="eager")
    assert is_compiled(lm)
    for found, wanted in zip(logits(lm), before, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_layers_share_what_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def built(layers: int) -> int:
        graphs: list[torch.fx.GraphModule] = []

        def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
            graphs.append(graph)
            return graph.forward

        monkeypatch.setattr(layer_compiler, "step_ms", times(2.0, 1.0))
        torch.compiler.reset()
        lm = PackedLM(model_of("llama", num_hidden_layers=layers), kv_mb=8)
        use_graphs(lm, "gathered")
        compile_layers(lm, None, "gathered", lambda: eager, backend=backend)
        logits(lm)
        return len(graphs)

    assert built(12) == built(3)


def test_hidden_states_that_are_asked_for_later_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_compiler, "step_ms", times(2.0, 1.0))
    lm, trial = steps_of("llama")
    compile_layers(lm, trial, "gathered", lambda: eager, backend="eager")
    lm.wants = OutcomeWants(features=(0, 2))
    table = lm.table()
    found = lm.forward([SequenceRows(table, [3, 4, 5], range(-1, 2), [2])]).features
    assert found is not None
    assert found.shape[:2] == (2, 3)
    assert found.abs().min() > 0


def test_layers_that_make_steps_slower_stay_as_they_were(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(layer_compiler, "step_ms", times(1.0, 2.0))
    lm, trial = steps_of("llama")
    before = logits(lm)
    compile_layers(lm, trial, "gathered", lambda: eager, backend="eager")
    assert not is_compiled(lm)
    assert "layers are not compiled: steps take {'1x1': 2.0} ms with them" in caplog.text
    assert all(map(np.array_equal, logits(lm), before))


def breaks(*_: Any) -> Any:
    raise RuntimeError("no C compiler\n" + "and much more " * 99)


def wrong(graph: torch.fx.GraphModule, _: Any) -> Any:
    """A compiler whose code computes something else."""
    return lambda *given: [each * 1.5 if _is_float(each) else each for each in graph(*given)]


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


@pytest.mark.parametrize(("backend", "why"), [(breaks, "no C compiler"), (wrong, "llama is not served")])
def test_layers_that_a_compiler_breaks_stay_as_they_were(
    backend: Any, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(layer_compiler, "step_ms", times(2.0, 1.0))
    lm, trial = steps_of("llama")
    before = logits(lm)
    compile_layers(lm, trial, "gathered", lambda: eager, backend=backend)
    assert not is_compiled(lm)
    assert why in caplog.text
    assert len(caplog.messages[-1]) < 400
    assert all(map(np.array_equal, logits(lm), before))
