"""Norms become one operation where that gives their own bits; all others stay as they are."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from outrider.lm import profile
from outrider.lm.norm import FusedNorm, fuse_norms
from outrider.lm.plan import SequenceRows
from outrider.lm.runner import PackedLM


class HalfRMSNorm(LlamaRMSNorm):
    """A norm of the same name and fields that computes something else."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states) / 2


def kinds(*norms: nn.Module) -> list[str]:
    model = nn.Sequential(*norms)
    for norm in norms:
        assert isinstance(norm.weight, nn.Parameter)
        nn.init.normal_(norm.weight)
    fuse_norms(model)
    return [type(norm).__name__ for norm in model]


@pytest.mark.parametrize("width", [16, 64, 224, 1000])
def test_norms_of_the_same_bits_are_fused(width: int) -> None:
    assert kinds(LlamaRMSNorm(width), Qwen3RMSNorm(width, eps=1e-5)) == ["FusedNorm"] * 2


def test_norms_of_other_bits_stay_as_they_are() -> None:
    assert kinds(GemmaRMSNorm(64), HalfRMSNorm(64)) == ["GemmaRMSNorm", "HalfRMSNorm"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_of_the_same_rounding_are_fused_and_others_are_not(dtype: torch.dtype) -> None:
    norms = [LlamaRMSNorm(64), HalfRMSNorm(64), GemmaRMSNorm(64)]
    model = nn.Sequential(*norms).to(dtype)
    for norm in norms:
        nn.init.normal_(norm.weight)
    fuse_norms(model, to_the_bit=False)
    assert [type(norm).__name__ for norm in model] == ["FusedNorm", "HalfRMSNorm", "GemmaRMSNorm"]


def test_a_fused_norm_keeps_the_weight_under_its_name() -> None:
    model = nn.Sequential(LlamaRMSNorm(32))
    weight = model[0].weight
    fuse_norms(model)
    assert isinstance(model[0], FusedNorm)
    assert dict(model.named_parameters())["0.weight"] is weight


def test_passes_give_the_same_bits_with_fused_norms(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def logits(lm: PackedLM) -> np.ndarray:
        table = lm.table()
        tree = SequenceRows(table, [5, 6, 7, 8, 9], [-1, 0, 0, 2, 1], [0, 1, 2, 3, 4])
        return lm.forward([tree]).rows().copy()

    fused = PackedLM.load(tiny_llama)
    layers = fused.model.config.num_hidden_layers
    assert sum(isinstance(module, FusedNorm) for module in fused.model.modules()) == 2 * layers + 1
    monkeypatch.setattr(profile, "fuse_norms", lambda model: 0)
    assert np.array_equal(logits(fused), logits(PackedLM.load(tiny_llama)))
