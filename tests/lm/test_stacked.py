"""Layers of one input as one product, as a GPU multiplies them."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from outrider.lm.device.stacked import StackedProduct
from outrider.lm.linear import PackedLinear, pack_linears
from outrider.lm.plan import SequenceRows
from outrider.lm.runner import PackedLM
from tests.lm.families import logits_of, model_of, twin_of


class Products(TorchDispatchMode):
    """Counts matrix products, those of attention apart."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += str(func).startswith(("aten.mm", "aten.addmm"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("family", "a_layer"), [("llama", 4), ("qwen3", 4), ("gpt_oss", 3), ("gpt_neox", 4)])
def test_layers_of_one_input_are_one_product_and_logits_stay(family: str, a_layer: int) -> None:
    model = model_of(family)
    stacked, own = PackedLM(twin_of(model)), PackedLM(model)
    pack_linears(stacked.model, stacked.find_layout, StackedProduct)
    found, counts = [], []
    for lm in (stacked, own):
        with Products() as products:
            found.append(logits_of(lm, [SequenceRows(lm.table(), [1, 2, 3], [-1, 0, 0], range(3))]))
        counts.append(products.count)

    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)
    layers = model.config.num_hidden_layers
    assert counts[0] <= min(layers * a_layer + 1, counts[1])


def test_a_single_layer_keeps_its_weight_and_stacked_ones_are_not_kept_twice() -> None:
    lm = PackedLM(model_of("llama", num_hidden_layers=1, tie_word_embeddings=True))
    layers = [module for module in lm.model.modules() if type(module) is nn.Linear]
    pack_linears(lm.model, lm.find_layout, StackedProduct)

    head = lm.model.get_output_embeddings()
    assert isinstance(head, PackedLinear)
    embedding = lm.model.get_input_embeddings().weight
    assert isinstance(embedding, torch.Tensor)
    assert head.weight.data_ptr() == embedding.data_ptr()
    assert [layer.weight for layer in layers] == [None] * len(layers)
