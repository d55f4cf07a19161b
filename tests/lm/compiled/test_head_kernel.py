"""The compiled kernel of heads gives the logits and the children of the eager head, and refuses the rest."""

import logging
import threading
from array import array
from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.compiling import library
from outrider.compiling.library import LibrarySource
from outrider.compiling.store import NeverCompiled
from outrider.lm.compiled import head_builder
from outrider.lm.compiled.head_builder import HeadBuilder
from outrider.lm.compiled.head_check import check_head
from outrider.lm.compiled.head_kernel import CompiledHead, DraftMemory, DraftRows, Ranking
from outrider.lm.heads.eagle import EagleHead
from outrider.lm.heads.pair_head import PairHead
from outrider.lm.heads.target_parts import TargetParts
from speculative.errors import EmptySupport
from speculative.level_ranking import level_children
from speculative.noise import PositionNoise
from tests.lm.compiled_heads import LAYOUTS, compiled, kernel_folder, random_head
from tests.lm.families import VOCABULARY
from tests.lm.random_heads import LAYER, TARGET, shaken

PLANES = [torch.randn(2, 32, 8, generator=torch.Generator().manual_seed(at)) for at in range(2)]
"""Keys and values of 31 committed tokens."""
LEAST = (0.01, 0.2, 0.6)
"""Probabilities below which a token is no child of the first, the second and the third row."""


def rows_of(
    head: CompiledHead, ranking: Ranking | None, count: int = 3, scale: float = 1.0, room: int = 8
) -> DraftRows:
    """The first level of a draft of several rows."""
    before = scale * torch.randn(head.feature_shape, generator=torch.Generator().manual_seed(7))
    memory = DraftMemory(head, ((0, 32),), before, room)
    return DraftRows(memory, range(3, 3 + count), [-1] * count, 31, ranking, LEAST[:count])


@pytest.mark.parametrize("rounded", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_compiled_head_gives_the_hidden_states_and_logits_of_the_eager_head(
    layout: str, rounded: bool
) -> None:
    for seed in range(3):
        head = random_head(layout, TARGET, seed)
        if rounded:  # such weights are kept in bfloat16
            for weight in head.parameters():
                weight.copy_(weight.bfloat16())
        assert check_head(compiled(head), head, VOCABULARY) is None


def test_several_threads_give_the_same_logits() -> None:
    head = compiled(random_head("eagle", TARGET))
    (alone,) = head.level(PLANES, [rows_of(head, None)])
    alone, threads = np.array(alone), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        (together,) = head.level(PLANES, [rows_of(head, None)])
    finally:
        torch.set_num_threads(threads)
    np.testing.assert_array_equal(together, alone)


def test_a_compiled_head_with_other_weights_fails_the_check() -> None:
    head = random_head("eagle", TARGET)
    made = compiled(head)
    head.layer.mlp.down_proj.weight.mul_(1.2)
    assert "at level 1: a logit by" in str(check_head(made, head, VOCABULARY))


@pytest.mark.parametrize("layout", ["eagle", "eagle3"])
@pytest.mark.parametrize("temperature", [0.0, 0.3, 0.8, 1.5])
def test_a_compiled_head_ranks_children_as_the_rule_does(layout: str, temperature: float) -> None:
    head = compiled(random_head(layout, TARGET))
    for seed in range(8):
        noise = None if temperature == 0 else PositionNoise(seed, 32, VOCABULARY)
        ranking = Ranking(None if noise is None else noise.leads, temperature, 1.0, 5)
        scale = 0.02 + 0.3 * seed
        (logits,) = head.level(PLANES, [rows_of(head, None, scale=scale)])
        assert not isinstance(logits, list)
        wanted = level_children(np.array(logits), noise, temperature, 1.0, LEAST, 5)
        (found,) = head.level(PLANES, [rows_of(head, ranking, scale=scale)])
        assert [[token for token, _ in row] for row in found] == [
            [token for token, _ in row] for row in wanted
        ]
        shares = [share for row in found for _, share in row]
        assert shares == pytest.approx([share for row in wanted for _, share in row], rel=1e-4)


def test_sessions_of_one_call_do_not_see_each_other() -> None:
    head = compiled(random_head("mtp", TARGET))
    greedy, sampled = (Ranking(leads, 0.7, 1.0, 5) for leads in (None, PositionNoise(3, 9, VOCABULARY).leads))
    alone = [head.level(PLANES, [rows_of(head, ranking)])[0] for ranking in (greedy, sampled)]
    asked = [rows_of(head, greedy), rows_of(head, None, 2), rows_of(head, sampled)]
    found = head.level(PLANES, asked)
    assert [found[0], found[2]] == alone
    assert np.shape(found[1]) == (2, VOCABULARY)


def test_logits_that_are_no_numbers_are_refused() -> None:
    head = compiled(random_head("eagle", TARGET))
    ranking = Ranking(None, 0.0, 1.0, 5)
    with pytest.raises(EmptySupport, match="nan"):
        head.level(PLANES, [rows_of(head, ranking, scale=float("nan"))])


def test_addresses_are_checked_before_they_are_read() -> None:
    head = compiled(random_head("eagle", TARGET))
    with pytest.raises(ValueError, match="float64"):
        DraftMemory(head, ((0, 32),), torch.zeros(head.feature_shape, dtype=torch.float64), 8)
    with pytest.raises(ValueError, match="3 rows has room for 2"):
        head.level(PLANES, [rows_of(head, None, room=2)])
    with pytest.raises(ValueError, match="20 uint16 leads"):
        head.level(PLANES, [rows_of(head, Ranking(np.zeros(20, np.uint16), 1.0, 1.0, 5))])
    rows = rows_of(head, None)._replace(tokens=(1, 2, VOCABULARY))
    with pytest.raises(ValueError, match="token 61"):
        head.level(PLANES, [rows])
    with pytest.raises(ValueError, match="slot 32"):
        head.write(PLANES, array("q", (1, 0, 32, 0, 0)))


def gelu() -> PairHead:
    layer = LAYER.__class__(**{**LAYER.to_dict(), "hidden_act": "gelu"})
    return shaken(EagleHead(TARGET, layer))


def odd_embeddings() -> PairHead:
    target = TargetParts(TARGET.shape, lambda ids: ids, TARGET.lm_head, TARGET.device, TARGET.dtype)
    return shaken(EagleHead(target, LAYER))


def few_embeddings() -> PairHead:
    table = torch.nn.Embedding(7, TARGET.shape.width)
    return shaken(
        EagleHead(TargetParts(TARGET.shape, table, TARGET.lm_head, TARGET.device, TARGET.dtype), LAYER)
    )


def more_logits() -> PairHead:
    wide = torch.nn.Linear(TARGET.shape.width, VOCABULARY + 3, bias=False)
    return shaken(
        EagleHead(TargetParts(TARGET.shape, TARGET.embed, wide, TARGET.device, TARGET.dtype), LAYER)
    )


def narrow_embeddings() -> PairHead:
    table = torch.nn.Embedding(VOCABULARY, TARGET.shape.width // 2)
    return shaken(
        EagleHead(TargetParts(TARGET.shape, table, TARGET.lm_head, TARGET.device, TARGET.dtype), LAYER)
    )


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (gelu, "silu alone"),
        (odd_embeddings, "no plain table"),
        (few_embeddings, f"7 of {VOCABULARY} ids"),
        (more_logits, f"to {VOCABULARY + 3}"),
        (narrow_embeddings, "embeddings are 16 wide"),
    ],
)
def test_a_head_with_a_part_that_the_kernel_lacks_is_never_compiled(made: object, why: str) -> None:
    assert callable(made)
    with pytest.raises(NeverCompiled, match=why):
        compiled(made())


class TestBuilder:
    """What has a head compiled beside serving."""

    def test_uses_a_kernel_of_the_cache_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = kernel_folder()
        monkeypatch.setattr(library, "compile_command", never)
        builder = HeadBuilder(random_head("eagle", TARGET), VOCABULARY, folder)
        builder.start()
        assert builder.ready is not None

    def test_compiles_what_the_cache_lacks(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (built,) = kernel_folder().glob("**/head_kernel.so")
        monkeypatch.setattr(library, "compile_command", lambda *given: ["cp", str(built), str(given[2])])
        builder = HeadBuilder(random_head("eagle", TARGET), VOCABULARY, tmp_path)
        builder.start()
        builder.wait()
        assert builder.ready is not None
        assert list(tmp_path.glob("**/head_kernel.so")), "the cache keeps the kernel for the next process"

    def test_a_compiler_that_fails_leaves_the_head_eager_with_one_warning(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(library, "compile_command", lambda *given: ["false"])
        builder = HeadBuilder(random_head("eagle", TARGET), VOCABULARY, tmp_path)
        builder.start()
        builder.wait()
        assert builder.ready is None
        (warning,) = [each for each in caplog.records if each.levelno >= logging.WARNING]
        assert "the head stays eager" in warning.message

    def test_a_kernel_that_computes_something_else_leaves_the_head_eager(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        folder = kernel_folder()
        other = compiled(random_head("eagle", TARGET, seed=1))
        monkeypatch.setattr(head_builder, "CompiledHead", lambda *given: other)
        builder = HeadBuilder(random_head("eagle", TARGET), VOCABULARY, folder)
        builder.start()
        builder.wait()
        assert builder.ready is None
        assert "differs from the eager one at level 1" in caplog.text

    def test_a_head_in_bfloat16_stays_eager_without_a_warning(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO)
        builder = HeadBuilder(random_head("eagle", TARGET).bfloat16(), VOCABULARY, tmp_path)
        builder.start()
        builder.wait()
        assert builder.ready is None
        assert "not in bfloat16 on cpu" in caplog.text
        assert {each.levelno for each in caplog.records} == {logging.INFO}

    def test_closing_ends_the_compiler(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        kernel_folder()  # skips where there is no compiler
        started = threading.Event()

        def never_ends(source: LibrarySource, compiler: str, folder: Path) -> list[str]:
            started.set()
            return ["sleep", "1000"]

        monkeypatch.setattr(library, "compile_command", never_ends)
        builder = HeadBuilder(random_head("eagle", TARGET), VOCABULARY, tmp_path)
        builder.start()
        assert started.wait(60)
        builder.close()
        assert builder.ready is None


def never(source: LibrarySource, compiler: str, folder: Path) -> list[str]:
    raise AssertionError("the kernel is in the cache")
