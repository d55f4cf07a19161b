"""Linear layers of one input (query, key and value; gate and up) as one product on a GPU.

A step of few rows is bound by reading weights, and a GPU reads one large matrix faster than three small ones.
"""

import torch
from torch import nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from outrider.lm.linear import Held, stacked_bias


class StackedProduct:
    """The weights of layers with one input, one below another. A `outrider.lm.linear.Product`."""

    def __init__(self, layers: list[nn.Linear]) -> None:
        weights = [layer.weight.detach() for layer in layers]
        # A single layer keeps its own weight, which may be tied to the embedding's.
        self._weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        self.out_features = len(self._weight)
        self.bias = stacked_bias(layers)
        self.held: Held | None = None

    def compute(self, rows: torch.Tensor) -> torch.Tensor:
        """``rows`` times the stacked weights, plus the bias."""
        return linear(rows, self._weight, self.bias)

    def weight(self) -> torch.Tensor:
        """The stacked weights, ``[out, in]``."""
        return self._weight


def stacked_on_gpu(layers: list[nn.Linear]) -> StackedProduct:
    """The product of these layers; memory of layers that were stacked before goes back to the GPU."""
    # What was freed is too small for the next layers' weights in one piece, so the allocator cannot reuse it.
    torch.cuda.empty_cache()
    return StackedProduct(layers)


def can_stack(model: PreTrainedModel) -> bool:
    """Whether the model's linear layers can be stacked on its GPU: not where its weights are quantised."""
    return model.device.type == "cuda" and getattr(model, "hf_quantizer", None) is None
