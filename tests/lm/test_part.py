"""Some of a model's layers and sublayers as a model of their own."""

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from outrider.lm.load.part import ModelPart
from outrider.lm.plan import SequenceRows
from outrider.lm.runner import PackedLM
from outrider.skip_set import Sublayer, read_skips, whole_layers
from speculative.errors import InvalidRequest, ModelRefused
from tests.lm.families import check_pass, logits_of, model_of

IDS = [3, 17, 40, 5, 5, 22]
IN_PART = [
    "2.mlp",
    "0.attention",  # an MLP comes before the first attention
    "1.attention,2.attention",  # three MLPs follow one attention
    "0,1.attention,2.mlp,3",
    "0.mlp,1.mlp,2.mlp,3.mlp",
]


def part_of(text: str) -> ModelPart:
    return ModelPart(read_skips(text.split(",")))


def without(model: PreTrainedModel, skip: str) -> PreTrainedModel:
    """The model with transformers' own modules changed: a skipped one adds nothing to its input."""
    for layer, kind in read_skips(skip.split(",")):
        if kind == "attention":
            model.model.layers[layer].self_attn.forward = adds_nothing_to
        else:
            model.model.layers[layer].mlp.forward = torch.zeros_like
    return model


def adds_nothing_to(hidden_states: torch.Tensor, **_: object) -> tuple[torch.Tensor, None]:
    return torch.zeros_like(hidden_states), None


def last_rows(lm: PackedLM, ids: list[int] = IDS) -> torch.Tensor:
    """Logits of all rows of a chain."""
    return logits_of(lm, [SequenceRows(lm.table(), ids, range(-1, len(ids) - 1), range(len(ids)))])


def own_logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([IDS]), use_cache=False).logits[0]


@pytest.mark.parametrize(
    ("part", "kept"),
    [
        (ModelPart(), [0, 1, 2, 3]),
        (ModelPart(whole_layers([1, 2])), [0, 3]),
        (ModelPart(first=3), [0, 1, 2]),
        (ModelPart(whole_layers([0]), first=2), [1]),
    ],
)
def test_the_layers_that_are_kept(part: ModelPart, kept: list[int]) -> None:
    assert part.kept(4) == sorted(whole_layers(kept))


def test_the_sublayers_that_are_kept() -> None:
    kept = part_of("0.mlp,1").kept(3)
    assert kept == [Sublayer(0, "attention"), Sublayer(2, "attention"), Sublayer(2, "mlp")]


@pytest.mark.parametrize(
    ("part", "why"),
    [
        (part_of("2,4"), "layer 4 cannot be skipped: the model has layers 0 to 3"),
        (part_of("4.mlp"), "layer 4 cannot be skipped: the model has layers 0 to 3"),
        (ModelPart(first=5), "4 layers: it cannot exit after 5"),
        (part_of("0,1,2,3"), "no layer of 4 is left"),
        (part_of("0,1,2,3.attention"), "no attention of 4 layers is left"),
    ],
)
def test_what_cannot_be_skipped_is_refused_by_number(part: ModelPart, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        part.apply(model_of("llama"))


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2"])
def test_a_part_computes_what_the_whole_model_does_without_these_layers(family: str) -> None:
    whole, part = model_of(family), model_of(family)
    layers = whole.base_model.layers if hasattr(whole.base_model, "layers") else whole.base_model.h
    for skipped in (1, 2):
        layers[skipped].forward = lambda hidden, *_args, **_named: hidden
    part_of("1,2").apply(part)
    lm = PackedLM(part)
    check_pass(lm)
    assert lm.pool.layout.layers == 2, "keys and values of the layers that are left"
    assert torch.allclose(last_rows(lm), own_logits(whole), atol=1e-4)


@pytest.mark.parametrize("skip", IN_PART)
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_a_part_computes_what_the_whole_model_does_without_these_sublayers(family: str, skip: str) -> None:
    whole, part = without(model_of(family), skip), model_of(family)
    part_of(skip).apply(part)
    lm = PackedLM(part)
    check_pass(lm)
    lm.pack()
    assert torch.allclose(last_rows(lm), own_logits(whole), atol=1e-4)


def test_each_layer_has_the_window_of_its_own_attention() -> None:
    kinds = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
    changes = {"layer_types": kinds, "use_sliding_window": True, "sliding_window": 3}
    part = model_of("qwen3", **changes)
    part_of("0.attention,2").apply(part)
    lm = PackedLM(part)
    check_pass(lm)
    assert part.config.layer_types == ["sliding_attention", "sliding_attention"]
    assert torch.allclose(
        last_rows(lm), own_logits(without(model_of("qwen3", **changes), "0.attention,2")), atol=1e-4
    )


def test_skipped_sublayers_hold_no_weights_keys_or_values(tmp_path: Path) -> None:
    model = model_of("llama")
    sizes = {
        kind: sum(one.numel() for one in (*norm.parameters(), *module.parameters()))
        for layer in [model.model.layers[0]]
        for kind, norm, module in (
            ("attention", layer.input_layernorm, layer.self_attn),
            ("mlp", layer.post_attention_layernorm, layer.mlp),
        )
    }
    whole = sum(one.numel() for one in model.parameters())
    model.save_pretrained(tmp_path)
    part_of("0.attention,1,2.mlp").apply(model)
    assert sum(one.numel() for one in model.parameters()) == whole - 2 * sizes["attention"] - 2 * sizes["mlp"]
    lm = PackedLM.load(tmp_path, part=part_of("0.attention,1,2.mlp"))
    assert lm.pool.layout.layers == 2


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "gpt_neox", "gpt_oss", "llama4_text"])
def test_a_family_whose_layers_are_of_another_form_is_skipped_by_whole_layers_only(family: str) -> None:
    with pytest.raises(ModelRefused, match=f"no sublayer of {family} can be skipped.*skip whole layers"):
        part_of("1.mlp").apply(model_of(family))


@pytest.mark.parametrize("skip", ["2.attention", "3.attention"], ids=["itself", "the layer behind it"])
def test_a_layer_that_scales_what_it_adds_is_not_taken_apart(skip: str) -> None:
    model = model_of("llama")
    scaled = model.model.layers[2]
    own = scaled.forward
    scaled.forward = lambda hidden, **named: hidden + 0.5 * (own(hidden, **named) - hidden)
    with pytest.raises(ModelRefused, match="no sublayer of llama can be skipped"):
        part_of(skip).apply(model)


@pytest.mark.slow
def test_compiled_passes_of_a_part_give_its_logits(tmp_path: Path) -> None:
    skip = "0.attention,1,2.mlp"
    model = model_of("qwen3")
    model.save_pretrained(tmp_path / "model")
    lm = PackedLM.load(tmp_path / "model", part=part_of(skip))
    try:
        lm.compile_passes("compiled", tmp_path)
        assert lm.compiled is not None
        assert torch.allclose(last_rows(lm), own_logits(without(model, skip)), atol=1e-4)
    finally:
        lm.close()
