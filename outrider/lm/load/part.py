"""Parts of a model: some of its layers and sublayers draft for the whole (arXiv 2309.08168).

A model without some of its layers is a model of the same kind with fewer layers. It has the whole model's
vocabulary and much of its taste, and needs no training. Of layers that are skipped in part, each attention
that is left becomes a layer, with the MLPs up to the next attention. So the layers go on counting whatever
keeps keys and values: a skipped attention keeps none.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from outrider.lm.load.sublayers import Steps, whole_only
from outrider.skip_set import KINDS, SkipSet, Sublayer
from speculative.errors import InvalidRequest, ModelRefused


class PartOf(NamedTuple):
    """What a part was made from: enough to make another one like it."""

    config: PreTrainedConfig
    """Configuration of the whole model."""
    part: "ModelPart"


@dataclass(frozen=True, slots=True)
class ModelPart:
    """Which layers and sublayers of a model are kept; 0 is the first layer."""

    skip: SkipSet = frozenset()
    """The sublayers that are skipped (self-speculative decoding)."""
    first: int = 0
    """Number of leading layers that are kept, before any are skipped (early exit); 0: all layers."""

    def kept(self, count: int) -> list[Sublayer]:
        """The kept sublayers of `count` layers, in order.

        Raises InvalidRequest for layers that the model lacks, and where no attention is left.
        """
        missing = sorted(sublayer.layer for sublayer in self.skip if not 0 <= sublayer.layer < count)
        if missing:
            raise InvalidRequest(
                f"layer {missing[0]} cannot be skipped: the model has layers 0 to {count - 1}"
            )
        if not 0 <= self.first <= count:
            raise InvalidRequest(f"the model has {count} layers: it cannot exit after {self.first}")
        every = [Sublayer(layer, kind) for layer in range(self.first or count) for kind in KINDS]
        kept = [sublayer for sublayer in every if sublayer not in self.skip]
        if not kept:
            raise InvalidRequest(f"no layer of {count} is left to run; skip fewer layers")
        if not any(sublayer.kind == "attention" for sublayer in kept):
            raise InvalidRequest(f"no attention of {count} layers is left to run; skip fewer of them")
        return kept

    def apply(self, model: PreTrainedModel) -> PartOf | None:
        """Takes the other sublayers out of a model that was just loaded; None where there are none.

        Raises InvalidRequest for layers that are not there, ModelRefused where its layers are not found, or
        are not of a form of which a part can be skipped.
        """
        count = model.config.get_text_config().num_hidden_layers
        kept = self.kept(count)
        if _is_whole(kept, count):
            return None
        stack = layer_stack(model)
        if stack is None:
            kind = model.config.model_type
            raise ModelRefused(f"no layers of {kind} can be skipped: it has no list of layers", kind)
        left = {sublayer.layer for sublayer in kept}
        in_part = len(kept) < len(KINDS) * len(left)
        # A layer that is kept whole may take up the MLP of the next one, so all have to be of the form.
        if in_part and (why := whole_only(model, [stack[layer] for layer in left])):
            raise ModelRefused(why, model.config.model_type)
        whole = deepcopy(model.config)
        self.cut(model)
        return PartOf(whole, self)

    def cut(self, model: PreTrainedModel) -> None:
        """Takes the other sublayers out of a model of which `apply` has accepted another."""
        config = model.config.get_text_config()
        count = config.num_hidden_layers
        kept = self.kept(count)
        if _is_whole(kept, count):
            return
        stack = layer_stack(model)
        assert stack is not None, "`apply` found the layers"
        runs = _by_attention(kept)
        layers = [_layer_of(stack, run) for run in runs]
        del stack[:]
        stack.extend(layers)
        for index, layer in enumerate(stack):
            for module in layer.modules():
                if hasattr(module, "layer_idx"):
                    setattr(module, "layer_idx", index)  # noqa: B010 -- typed as a tensor or a module
        attending = [sublayer.layer for run in runs for sublayer in run if sublayer.kind == "attention"]
        for name, value in list(vars(config).items()):
            if isinstance(value, list) and len(value) == count:  # one entry for each layer, as layer_types
                setattr(config, name, [value[layer] for layer in attending])
        config.num_hidden_layers = len(attending)


def _is_whole(kept: Sequence[Sublayer], count: int) -> bool:
    """Whether these are all sublayers of `count` layers."""
    return len(kept) == len(KINDS) * count


def _by_attention(kept: Sequence[Sublayer]) -> list[list[Sublayer]]:
    """The sublayers in runs of one attention each: MLPs go with the attention before them, if any."""
    starts = [at for at, sublayer in enumerate(kept) if sublayer.kind == "attention"]
    bounds = [0, *starts[1:], len(kept)]
    return [list(kept[low:high]) for low, high in pairwise(bounds)]


def _layer_of(stack: nn.ModuleList, run: Sequence[Sublayer]) -> nn.Module:
    """The module that computes these sublayers: the model's own layer where they are all of one layer."""
    layers = {sublayer.layer for sublayer in run}
    if len(layers) == 1 and len(run) == len(KINDS):
        return stack[run[0].layer]
    return Steps([(stack[sublayer.layer], sublayer.kind) for sublayer in run])


def layer_stack(model: PreTrainedModel) -> nn.ModuleList | None:
    """The model's layers: the list of as many modules as the config has layers; None where there is none."""
    count = model.config.get_text_config().num_hidden_layers
    lists = (module for module in model.base_model.modules() if isinstance(module, nn.ModuleList))
    return next((found for found in lists if len(found) == count), None)
