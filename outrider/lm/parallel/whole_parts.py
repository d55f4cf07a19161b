"""Whole copies of the layers of a split model that heads compute with: rank 0 alone computes heads."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from outrider.lm.heads.target_parts import TargetPart, TargetParts
from outrider.lm.load.source import first_line
from outrider.lm.parallel.rank_group import RankGroup, RankLost
from speculative.errors import ModelRefused


def gather_parts(
    model: PreTrainedModel, names: Sequence[TargetPart], rank_group: RankGroup
) -> TargetParts | None:
    """The named parts of a model that ranks hold together, whole, for the heads of rank 0; None elsewhere.

    Every rank calls this with the same names, and has room for the copies for a moment. In place of a layer
    that is not named, the result has a function that raises. Raises ModelRefused on every rank if the ranks'
    weights do not make up a layer, and RankLost if a rank has no memory or takes no part.
    """
    if not names:
        return None
    parts = TargetParts.of(model)
    gathered: dict[int, torch.Tensor] = {}  # embeddings and LM head may be one weight
    found: dict[str, Any] = {"embed": _left_split, "lm_head": _left_split}
    try:
        for name in names:
            layer = getattr(parts, name)
            assert isinstance(layer, nn.Module)
            found[name] = _whole(layer, gathered)
    except torch.OutOfMemoryError as error:
        raise RankLost(
            f"rank {rank_group.info.rank} has no memory left for a whole copy of the target's {name}, with "
            f"which heads compute: {first_line(error)}"
        ) from error
    except RuntimeError as error:
        raise rank_group.lost("while weights were gathered a rank", error) from error
    for name in names:
        _check_whole(found[name], name, model.config.model_type, parts)
    return None if rank_group.info.rank else replace(parts, **found)


def _whole(layer: nn.Module, gathered: dict[int, torch.Tensor]) -> nn.Module:
    """A copy of a layer that runs in this process alone; weights that are whole here are shared with it."""
    found = copy.copy(layer)
    vars(found).pop("forward", None)  # the plan's forward, which waits for the other ranks
    found._parameters = dict(layer._parameters)  # absent ones, such as a bias, too
    for name, weight in layer.named_parameters(recurse=False):
        if id(weight) not in gathered:
            gathered[id(weight)] = weight.full_tensor() if isinstance(weight, DTensor) else weight
        setattr(found, name, nn.Parameter(gathered[id(weight)].detach(), requires_grad=False))
    return found


def _check_whole(layer: nn.Module, name: str, kind: str, parts: TargetParts) -> None:
    """Raises ModelRefused for a layer that is not as large as that of the whole model."""
    shape = tuple(layer.weight.shape) if isinstance(layer.weight, torch.Tensor) else ()
    if len(shape) != 2 or shape[0] < parts.shape.vocabulary_size or shape[1] != parts.shape.width:
        raise ModelRefused(
            f"{kind} over several ranks takes no head that uses its {name}: the weights of the ranks make "
            f"{list(shape)}, not [{parts.shape.vocabulary_size}, {parts.shape.width}]; leave --heads out",
            kind,
        )


def _left_split(_: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("a head computes with a layer of the target that it did not name")
