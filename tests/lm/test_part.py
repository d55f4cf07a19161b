"""Some of a model's layers as a model of their own."""

import pytest
import torch

from outrider.lm.load.part import ModelPart
from outrider.lm.plan import SequenceRows
from outrider.lm.runner import PackedLM
from speculative.errors import InvalidRequest
from tests.lm.families import check_pass, logits_of, model_of

IDS = [3, 17, 40, 5, 5, 22]


@pytest.mark.parametrize(
    ("part", "kept"),
    [
        (ModelPart(), [0, 1, 2, 3]),
        (ModelPart(skip=(1, 2)), [0, 3]),
        (ModelPart(first=3), [0, 1, 2]),
        (ModelPart(skip=(0,), first=2), [1]),
    ],
)
def test_the_layers_that_are_kept(part: ModelPart, kept: list[int]) -> None:
    assert part.kept(4) == kept


@pytest.mark.parametrize(
    ("part", "why"),
    [
        (ModelPart(skip=(2, 4)), "layer 4 cannot be skipped: the model has layers 0 to 3"),
        (ModelPart(skip=(-1,)), "layer -1 cannot be skipped"),
        (ModelPart(first=5), "4 layers: it cannot exit after 5"),
        (ModelPart(skip=(0, 1, 2, 3)), "no layer of 4 is left"),
    ],
)
def test_layers_that_are_not_there_are_refused_by_number(part: ModelPart, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        part.apply(model_of("llama"))


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2"])
def test_a_part_computes_what_the_whole_model_does_without_these_layers(family: str) -> None:
    whole, part = model_of(family), model_of(family)
    layers = whole.base_model.layers if hasattr(whole.base_model, "layers") else whole.base_model.h
    for skipped in (1, 2):
        layers[skipped].forward = lambda hidden, *_args, **_named: hidden
    ModelPart(skip=(1, 2)).apply(part)
    lm = PackedLM(part)
    check_pass(lm)
    assert lm.pool.layout.layers == 2, "keys and values of the layers that are left"
    rows = SequenceRows(lm.table(), IDS, range(-1, len(IDS) - 1), range(len(IDS)))
    with torch.no_grad():
        expected = whole(torch.tensor([IDS]), use_cache=False).logits[0]
    assert torch.allclose(logits_of(lm, [rows]), expected, atol=1e-4)
