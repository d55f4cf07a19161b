"""Where no compiled pass can be had, passes go on eagerly, and one warning says why."""

import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from outrider.compiling.toolchain import find_compiler
from outrider.lm.compiled.panels import panels_of, smallest_panels
from outrider.lm.plan import SequenceRows
from outrider.lm.runner import PackedLM
from speculative.errors import InvalidRequest
from tests.lm.families import logits_of

IDS = [3, 1, 4, 1, 5, 9]

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler here")


def rows(lm: PackedLM) -> torch.Tensor:
    table = lm.table()
    logits = logits_of(lm, [SequenceRows(table, IDS, range(-1, len(IDS) - 1), range(len(IDS)))])
    lm.release(table)
    return logits


def test_without_a_compiler_passes_stay_eager_and_a_warning_says_so(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lm = PackedLM.load(tiny_llama)
    before = rows(lm)
    monkeypatch.setenv("PATH", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        lm.compile_passes("auto", tmp_path)
        assert lm.compiler is not None
        lm.compiler.wait(for_child=True)
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "stay eager: there is no C++ compiler (g++) on the PATH; install one; compiled passes" in warning
    assert warning.endswith("compiled passes of few rows take a fifth to a quarter of the time")
    assert torch.equal(rows(lm), before)
    assert lm.compiled is None
    lm.close()


def test_compiled_passes_that_cannot_be_had_are_refused_where_they_were_asked_for(
    tiny_llama: Path, tmp_path: Path
) -> None:
    lm = PackedLM.load(tiny_llama, dtype="bfloat16")
    with pytest.raises(InvalidRequest, match="float32 alone, not in bfloat16"):
        lm.compile_passes("compiled", tmp_path)
    lm.close()


def test_a_dtype_without_compiled_passes_is_no_reason_to_warn(
    tiny_llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lm = PackedLM.load(tiny_llama, dtype="bfloat16")
    with caplog.at_level(logging.INFO):
        lm.compile_passes("auto", tmp_path)
        assert lm.compiler is not None
        lm.compiler.wait(for_child=True)
    (said,) = [record for record in caplog.records if "stay eager" in record.getMessage()]
    assert said.levelno == logging.INFO
    assert "of the time" not in said.getMessage(), "nothing that could be installed brings it"
    assert lm.compiled is None
    lm.close()


@needs_compiler
def test_a_cache_folder_that_others_may_write_leaves_passes_eager_and_one_warning_says_so(
    tiny_llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "passes").mkdir()
    (tmp_path / "passes").chmod(0o777)
    lm = PackedLM.load(tiny_llama)
    with caplog.at_level(logging.WARNING):
        lm.compile_passes("auto", tmp_path)
        assert lm.compiler is not None
        lm.compiler.wait(for_child=True)
    (warning,) = [record.getMessage() for record in caplog.records]
    assert f"stay eager: {tmp_path / 'passes'} has mode 0777" in warning
    assert lm.compiled is None
    assert list((tmp_path / "passes").iterdir()) == []
    lm.close()


@needs_compiler
def test_closing_a_model_ends_the_wait_for_compiled_passes_and_the_child(
    tiny_llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lm = PackedLM.load(tiny_llama)
    with ThreadPoolExecutor() as threads, caplog.at_level(logging.WARNING):
        waiting = threads.submit(lm.compile_passes, "compiled", tmp_path)
        deadline = time.monotonic() + 200
        while not list(tmp_path.glob("passes/building-*/tmp")):  # the child compiles
            assert time.monotonic() < deadline
            time.sleep(0.01)
        lm.close()
        with pytest.raises(InvalidRequest, match="cannot be compiled: it was stopped"):
            waiting.result(100)
    assert caplog.records == []
    assert [path.name for path in (tmp_path / "passes").iterdir()] == ["lock"]


class _Failing:
    def forward(self, plan: object, ids: Sequence[int], wanted: Sequence[int]) -> object:
        raise RuntimeError("a package failed")


def test_a_package_that_fails_in_a_pass_is_given_up_and_the_pass_runs_eagerly(
    tiny_llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lm = PackedLM.load(tiny_llama)
    before = rows(lm)
    lm.use_compiled(_Failing())  # type: ignore[arg-type]
    assert lm.numerics == "cpu float32 compiled"
    with caplog.at_level(logging.WARNING):
        assert torch.equal(rows(lm), before)
        assert torch.equal(rows(lm), before)
    assert lm.numerics == "cpu float32"
    assert [record.getMessage() for record in caplog.records] == [
        "passes of llama are eager from now on: a package failed"
    ]


def test_every_change_of_passes_begins_a_class_of_its_own(tiny_llama: Path) -> None:
    lm = PackedLM.load(tiny_llama)
    classes = [lm.pool.numerics]
    for runner in (_Failing(), None, _Failing()):
        lm.use_compiled(runner)  # type: ignore[arg-type]
        classes.append(lm.pool.numerics)
    assert len(set(classes)) == 4


@pytest.mark.parametrize("out", [1, 31, 32, 33, 70])
def test_panels_hold_every_weight_where_the_product_reads_it(out: int) -> None:
    weight = torch.randn(out, 5)
    panels = panels_of(weight, 32)
    assert panels.shape == (-(-out // 32), 5, 32)
    for output in range(out):
        assert torch.equal(panels[output // 32, :, output % 32], weight[output])
    assert panels.transpose(1, 2).reshape(-1, 5)[out:].abs().sum() == 0


def test_panels_are_in_bfloat16_only_where_no_weight_changes() -> None:
    stored = torch.randn(70, 5).bfloat16().float()
    assert smallest_panels(stored, 32).dtype is torch.bfloat16
    stored[69, 4] += 2**-20
    assert torch.equal(smallest_panels(stored, 32), panels_of(stored, 32))
    assert smallest_panels(torch.full((1, 1), float("nan")), 32).dtype is torch.float32
