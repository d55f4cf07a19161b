"""Heads before their first step of training: each begins as near to the target as its kind allows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import LlamaConfig

from outrider.lm.features import LAST
from outrider.lm.heads.eagle import EagleHead
from outrider.lm.heads.eagle3 import Eagle3Head
from outrider.lm.heads.hydra import GroundedBlock, HydraHeads, HydraSizes
from outrider.lm.heads.layer import PLAIN
from outrider.lm.heads.medusa import MedusaHeads
from outrider.lm.heads.mtp import PredictionModule
from outrider.lm.heads.pair_head import PairHead
from speculative.errors import ModelRefused
from training.heads.frozen import FrozenTarget

_EMBEDDING_STD = 0.02


def medusa(target: FrozenTarget, heads: int) -> MedusaHeads:
    """Heads that each begin as the target's LM head."""
    made = MedusaHeads(target.parts, heads)
    made.start_from(target.output_weights.float())
    _no_biases(made)
    return made.to(target.device)


def blockwise(target: FrozenTarget, heads: int) -> MedusaHeads:
    """Medusa's heads of two residual blocks before the target's LM head; each begins as that LM head.

    The paper's heads (arXiv 1811.03115) have two linear layers before an output layer that all share.
    """
    made = MedusaHeads(target.parts, heads, blocks=2, shared=True)
    _no_biases(made)
    return made.to(target.device)


@torch.no_grad()
def hydra(target: FrozenTarget, heads: int) -> HydraHeads:
    """Heads that each begin as the target's LM head, whatever tokens they read."""
    made = HydraHeads(target.parts, HydraSizes(heads))
    width = target.parts.shape.width
    for module in made.modules():
        if isinstance(module, GroundedBlock):
            module.linear.weight.zero_()
            residual = module.res_connection
            if isinstance(residual, torch.nn.Linear):
                residual.weight.zero_()
                residual.weight[:, :width].copy_(torch.eye(width))
    for output in made.hydra_lm_head:
        for layer in output.modules():
            if isinstance(layer, torch.nn.Linear):
                layer.weight.copy_(target.output_weights)
    _no_biases(made)
    return made.to(target.device)


def eagle(target: FrozenTarget) -> EagleHead:
    """A head of the size of one of the target's layers, which at first passes each feature on unchanged."""
    made = EagleHead(target.parts, _layer_of(target, EagleHead.kind))
    _unchanging(made, made.fc.weight)
    return made.to(target.device)


def eagle3(target: FrozenTarget, drafted_ids: torch.Tensor) -> Eagle3Head:
    """A head that at first drafts what the target says of the last layer that the head reads.

    Args:
        target: the target.
        drafted_ids: ids that the head may draft, int64, ascending.
    """
    shape = target.parts.shape
    layer, count = _layer_of(target, Eagle3Head.kind), len(drafted_ids)
    reduced = count < shape.vocabulary_size
    made = Eagle3Head(target.parts, layer, layers_read(shape.layers), count, reduced)
    _unchanging(made, made.fc.weight)
    with torch.no_grad():
        made.norm.weight.copy_(_last_norm(target))
        made.lm_head.weight.copy_(target.output_weights[drafted_ids])
    if reduced:
        made.get_buffer("d2t").copy_(drafted_ids - torch.arange(count))
    return made.to(target.device)


def mtp(target: FrozenTarget) -> PredictionModule:
    """A module that at first passes each feature on, scaled as the target's features are."""
    made = PredictionModule(target.parts, _layer_of(target, PredictionModule.kind), PLAIN)
    _unchanging(made, made.input_proj.weight)
    with torch.no_grad():
        made.final_layernorm.weight.fill_(float(_last_norm(target).square().mean().sqrt()))
    return made.to(target.device)


def layers_read(layers: int) -> tuple[int, ...]:
    """Layers whose outputs an EAGLE-3 head reads that is trained here: low, middle and last."""
    return tuple(sorted({min(1, layers - 1), layers // 2, layers - 1}))


READS: dict[str, Callable[[int], tuple[int, ...]]] = {Eagle3Head.kind: layers_read}
"""By kind of head that reads other layers than the last norm: these layers, given the number of layers."""


def reads_of(kind: str, target: FrozenTarget) -> tuple[int, ...]:
    """Layers of the target that a kind of head reads."""
    return READS[kind](target.parts.shape.layers) if kind in READS else (LAST,)


def _layer_of(target: FrozenTarget, kind: str) -> LlamaConfig:
    layer = target.parts.shape.layer
    if layer is None:
        family = target.model.config.model_type
        raise ModelRefused(
            f"a head of kind {kind} has a layer of the target's own kind, and {family} has none", family
        )
    return layer


def _last_norm(target: FrozenTarget) -> torch.Tensor:
    """Weights of the target's last norm, [width]; ones where the norm is not to be found."""
    norm = getattr(target.model.base_model, "norm", None)
    weights = getattr(norm, "weight", None)
    if not isinstance(weights, torch.Tensor):
        return torch.ones(target.parts.shape.width)
    return weights.detach().float()


@torch.no_grad()
def _unchanging(head: PairHead, fusion: torch.Tensor) -> None:
    """Draws a head's matrices so that its layer passes on the last part of what `fusion` reads."""
    for name, parameter in head.named_parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=_EMBEDDING_STD)
        elif name.endswith("bias"):
            torch.nn.init.zeros_(parameter)
    head.layer.self_attn.o_proj.weight.zero_()
    head.layer.mlp.down_proj.weight.zero_()
    width = len(fusion)
    fusion[:, -width:].copy_(torch.eye(width))


def _no_biases(head: torch.nn.Module) -> None:
    for name, parameter in head.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.zeros_(parameter)
