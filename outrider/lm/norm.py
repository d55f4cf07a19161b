"""Root mean square norms as one operation, where this operation gives what the model's own norm gives.

A family writes its norm as half a dozen operations, twice a layer. In a pass of few rows each costs more to
call than to compute.
"""

import torch
from torch import nn

_EPSILONS = ("variance_epsilon", "eps")
"""What families call the constant under the root."""
_SCALES = (1e-4, 1.0, 50.0)


class FusedNorm(nn.Module):
    """Replaces a norm: rows over the root of their mean square, times the weight."""

    def __init__(self, weight: nn.Parameter, epsilon: float) -> None:
        super().__init__()
        self.weight = weight
        self.variance_epsilon = epsilon

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """The normed rows, ``[..., width]``."""
        return torch.rms_norm(rows, self.weight.shape, self.weight, self.variance_epsilon)


@torch.inference_mode()
def fuse_norms(model: nn.Module, *, to_the_bit: bool = True) -> int:
    """Replaces every norm of the model that a FusedNorm repeats; returns the number replaced.

    Without ``to_the_bit``, outputs may differ by two roundings of their dtype: a fused kernel rounds once
    where the family rounds before it multiplies with the weight.
    """
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child).__name__.endswith("RMSNorm")
    ]
    fused = 0
    for parent, name, norm in found:
        if (made := _fused(norm, to_the_bit)) is not None:
            setattr(parent, name, made)
            fused += 1
    return fused


def _fused(norm: nn.Module, to_the_bit: bool) -> FusedNorm | None:
    """A FusedNorm with the weight of a norm; None where their outputs differ."""
    weight = getattr(norm, "weight", None)
    epsilon = next((getattr(norm, name) for name in _EPSILONS if hasattr(norm, name)), None)
    state = [*norm.parameters(), *norm.buffers()]
    if not isinstance(weight, nn.Parameter) or len(state) != 1 or weight.dim() != 1:
        return None
    if not isinstance(epsilon, float):
        return None
    fused = FusedNorm(weight, epsilon)
    chance = torch.Generator().manual_seed(weight.numel())
    for rows in (1, 3, 17):
        for scale in _SCALES:
            drawn = scale * torch.randn(1, rows, weight.numel(), generator=chance)
            sample = drawn.to(weight)
            try:
                own = norm(sample)
            except Exception:  # a norm that takes more than rows is none of these
                return None
            if not (isinstance(own, torch.Tensor) and _agree(own, fused(sample), to_the_bit)):
                return None
    return fused


def _agree(own: torch.Tensor, fused: torch.Tensor, to_the_bit: bool) -> bool:
    if to_the_bit or own.shape != fused.shape or own.dtype != fused.dtype:
        return torch.equal(own, fused)
    step = torch.finfo(own.dtype).eps
    return torch.allclose(own.float(), fused.float(), rtol=2 * step, atol=step * step)
