"""Parts of a model: some of its layers, with all else as it is, draft for the whole (arXiv 2309.08168).

A model without some of its layers is a model of the same kind with fewer layers. It has the whole model's
vocabulary and much of its taste, and needs no training.
"""

from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from speculative.errors import InvalidRequest, ModelRefused


@dataclass(frozen=True, slots=True)
class ModelPart:
    """Which layers of a model are kept; 0 is the first layer."""

    skip: tuple[int, ...] = ()
    """Numbers of the layers that are skipped (self-speculative decoding)."""
    first: int = 0
    """Number of leading layers that are kept, before any are skipped (early exit); 0: all layers."""

    def kept(self, count: int) -> list[int]:
        """Numbers of the kept layers, of `count`. Raises InvalidRequest for layers that the model lacks."""
        missing = sorted({layer for layer in self.skip if not 0 <= layer < count})
        if missing:
            raise InvalidRequest(
                f"layer {missing[0]} cannot be skipped: the model has layers 0 to {count - 1}"
            )
        if not 0 <= self.first <= count:
            raise InvalidRequest(f"the model has {count} layers: it cannot exit after {self.first}")
        kept = [layer for layer in range(self.first or count) if layer not in self.skip]
        if not kept:
            raise InvalidRequest(f"no layer of {count} is left to run; skip fewer layers")
        return kept

    def apply(self, model: PreTrainedModel) -> None:
        """Takes the other layers out of a model that was just loaded.

        Raises InvalidRequest for layers that are not there, ModelRefused where its layers are not found.
        """
        config = model.config.get_text_config()
        count = config.num_hidden_layers
        kept = self.kept(count)
        if len(kept) == count:
            return
        stack = layer_stack(model)
        if stack is None:
            kind = model.config.model_type
            raise ModelRefused(f"no layers of {kind} can be skipped: it has no list of layers", kind)
        for skipped in sorted(set(range(count)) - set(kept), reverse=True):
            del stack[skipped]
        for index, layer in enumerate(stack):
            for module in layer.modules():
                if hasattr(module, "layer_idx"):
                    setattr(module, "layer_idx", index)  # noqa: B010 -- typed as a tensor or a module
        for name, value in list(vars(config).items()):
            if isinstance(value, list) and len(value) == count:  # one entry for each layer, as layer_types
                setattr(config, name, [value[layer] for layer in kept])
        config.num_hidden_layers = len(kept)


def layer_stack(model: PreTrainedModel) -> nn.ModuleList | None:
    """The model's layers: the list of as many modules as the config has layers; None where there is none."""
    count = model.config.get_text_config().num_hidden_layers
    lists = (module for module in model.base_model.modules() if isinstance(module, nn.ModuleList))
    return next((found for found in lists if len(found) == count), None)
