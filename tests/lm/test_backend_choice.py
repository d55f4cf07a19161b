"""Which way passes go: the faster one that is right."""

from pathlib import Path

import pytest
import torch

from outrider.lm.attention.metadata import AttentionMetadata
from outrider.lm.graphs import backend_choice
from outrider.lm.graphs.capture import eager
from outrider.lm.load.check import Trial
from outrider.lm.plan import SequenceRows
from outrider.lm.runner import PackedLM
from speculative.errors import ModelRefused
from tests.lm.families import logits_of, model_of


@pytest.fixture
def lm() -> PackedLM:
    return PackedLM(model_of("llama"))


@pytest.mark.parametrize(("ragged_ms", "static_ms", "is_static"), [(2.0, 1.0, True), (1.0, 2.0, False)])
def test_the_faster_way_stays(
    lm: PackedLM, monkeypatch: pytest.MonkeyPatch, ragged_ms: float, static_ms: float, is_static: bool
) -> None:
    times = iter([{"1x1": ragged_ms}, {"1x1": static_ms}])
    monkeypatch.setattr(backend_choice, "step_ms", lambda _: next(times))

    backend_choice.compare_backends(lm, Trial.of(lm), "gathered", eager)

    assert (lm.steps is not None) == (lm.pool.deferred is not None) == is_static


def wrong(*given: object) -> torch.Tensor:
    query, values, metadata = given[0], given[2], given[3]
    assert isinstance(query, torch.Tensor)
    assert isinstance(values, torch.Tensor)
    assert isinstance(metadata, AttentionMetadata)
    return query.new_ones(*query.shape[:2], values.shape[2])


def failing(*given: object) -> torch.Tensor:
    raise OSError("no compiler")


@pytest.mark.parametrize(
    ("kernel", "why"), [("wrong", "differs from its own eager"), ("failing", "no compiler")]
)
def test_a_kernel_that_is_wrong_or_fails_leaves_passes_ragged_and_says_why(
    lm: PackedLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kernel: str, why: str
) -> None:
    monkeypatch.setitem(backend_choice.KERNELS, kernel, f"{__name__}:{kernel}")
    trial = Trial.of(lm)

    backend_choice.compare_backends(lm, trial, kernel, eager)

    assert lm.steps is None
    assert why in caplog.text
    trial.verify(lm)
    assert lm.pool.used_slots == 0


@pytest.mark.parametrize(
    ("kernel", "why"), [("wrong", "differs from its own eager"), ("failing", "OSError: no compiler")]
)
def test_where_graphs_are_required_a_kernel_that_is_wrong_or_fails_refuses_the_model(
    lm: PackedLM, monkeypatch: pytest.MonkeyPatch, kernel: str, why: str
) -> None:
    monkeypatch.setitem(backend_choice.KERNELS, kernel, f"{__name__}:{kernel}")

    with pytest.raises(ModelRefused, match=f"llama .*{why}.*cuda_graphs = prefer"):
        backend_choice.require_graphs(lm, Trial.of(lm), kernel, eager)

    assert lm.passes == "eager"
    assert lm.pool.used_slots == 0


def test_where_graphs_are_required_passes_are_steps_without_being_timed(lm: PackedLM) -> None:
    backend_choice.require_graphs(lm, Trial.of(lm), "gathered", eager)

    assert lm.passes == "static"


def test_without_triton_graphs_that_are_required_refuse_the_model(
    lm: PackedLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend_choice, "find_spec", lambda name: None)

    with pytest.raises(ModelRefused, match="Triton is not installed"):
        backend_choice.require_graphs(lm, None, "triton", eager)


def test_both_ways_are_timed_without_leaving_anything_behind(lm: PackedLM) -> None:
    calls = lm.forward_calls

    assert backend_choice.step_ms(lm).keys() == {"1x1", "1x8", "4x1", "4x16"}
    assert (lm.forward_calls, lm.pool.used_slots) == (calls, 0)


def test_a_cpu_model_runs_ragged_passes(tiny_llama: Path) -> None:
    lm = PackedLM.load(tiny_llama)
    table = lm.table()

    assert lm.steps is None
    assert logits_of(lm, [SequenceRows(table, [1], [-1], [0])]).isfinite().all()
    lm.release(table)
