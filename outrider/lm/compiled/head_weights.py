"""The weights of a head as the kernel reads them: the struct Head of `head_layer.hpp`."""

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from outrider.compiling.store import NeverCompiled
from outrider.lm.compiled.panels import smallest_panels
from outrider.lm.heads.pair_head import PairHead
from outrider.lm.heads.parts import HeadParts
from outrider.lm.large_pages import LargePages
from outrider.lm.linear import PackedLinear

_MOST_BYTES = 2**30
"""Largest weights of a head, its output layer included, that are kept twice, in bytes."""

_LINEAR = ("panels", "bias", "inputs", "outputs", "is_bfloat16")
_SIZES = (
    *("layers", "feature_width", "width", "inner", "heads", "key_heads", "head_dim"),
    *("vocabulary", "drafted", "adds_normed"),
)
_TABLES = ("embeddings", "frequencies", "drafted_ids")
_NORMS = (
    *("fusion_norm", "token_norm", "hidden_norm", "input_norm", "query_norm", "key_norm", "mlp_norm"),
    *("final_norm", "logits_norm"),
)
_PRODUCTS = ("fusion", "projection", "query", "keys_values", "output", "gate_up", "down", "lm_head")
_DOUBLES = ("eps", "rotary_scale")

Weights = tuple[Tensor, Tensor | None]
"""Weight and bias of a product."""


class _Linear(ctypes.Structure):
    """The struct Linear."""

    _fields_ = tuple((name, ctypes.c_int64) for name in _LINEAR)


class HeadStruct(ctypes.Structure):
    """The struct Head."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in _SIZES),
        *((name, ctypes.c_double) for name in _DOUBLES),
        *((name, ctypes.c_int64) for name in (*_TABLES, *_NORMS)),
        *((name, _Linear) for name in _PRODUCTS),
    )


class PackedHead:
    """A head's weights: products as panels, other parts as they lie in memory.

    Args:
        head: the head, float32 on the CPU.
        vocabulary_size: number of the target's ids.
        panel_width: number of outputs of a panel.

    Raises:
        NeverCompiled: the head has a part that the kernel does not compute.
    """

    def __init__(self, head: PairHead, vocabulary_size: int, panel_width: int) -> None:
        self._panel_width, self._memory = panel_width, LargePages()
        self._kept: list[Tensor] = []  # what the struct refers to
        parts = head.parts()
        attention, norm = head.layer.self_attn, head.layer.post_attention_layernorm
        self.struct = HeadStruct(
            **self._sizes(head, parts, vocabulary_size),
            eps=norm.variance_epsilon,
            rotary_scale=attention.rotary_scale,
            embeddings=self._table(_embeddings(parts, vocabulary_size)),
            frequencies=self._table(attention.frequencies),
            drafted_ids=0 if parts.drafted_ids is None else self._table(parts.drafted_ids),
            query_norm=self._norm(attention.q_norm if attention.is_normed else None),
            key_norm=self._norm(attention.k_norm if attention.is_normed else None),
            mlp_norm=self._norm(norm),
            **{name: self._norm(getattr(parts, name)) for name in _NORMS if name in HeadParts._fields},
            **{name: self._linear(each) for name, each in _products(parts).items()},
        )
        self._check_sizes(_embeddings(parts, vocabulary_size).shape[1])

    def _check_sizes(self, embedding_width: int) -> None:
        """Raises NeverCompiled for parts whose sizes differ: the kernel reads and writes by these sizes."""
        sizes, found = self.struct, self.struct.lm_head
        if (found.inputs, found.outputs) != (sizes.width, sizes.drafted) or embedding_width != sizes.width:
            raise NeverCompiled(
                f"its output layer is {found.inputs} to {found.outputs} and its embeddings are "
                f"{embedding_width} wide, where the head is {sizes.width} wide and drafts {sizes.drafted} ids"
            )

    def _sizes(self, head: PairHead, parts: HeadParts, vocabulary_size: int) -> dict[str, int]:
        attention, mlp, layers = head.layer.self_attn, head.layer.mlp, len(head.reads)
        width = mlp.down_proj.out_features
        return {
            "layers": layers,
            "feature_width": width if parts.fusion is None else parts.fusion.in_features // layers,
            "width": width,
            "inner": mlp.gate_proj.out_features,
            "heads": attention.q_proj.out_features // attention.head_dim,
            "key_heads": attention.k_proj.out_features // attention.head_dim,
            "head_dim": attention.head_dim,
            "vocabulary": vocabulary_size,
            "drafted": vocabulary_size if parts.drafted_ids is None else len(parts.drafted_ids),
            "adds_normed": parts.adds_normed,
        }

    def _norm(self, norm: Any) -> int:
        return 0 if norm is None else self._table(norm.weight.detach())

    def _table(self, numbers: Tensor) -> int:
        """The address of some numbers, which are kept as they lie if they lie in one piece."""
        whole = numbers.contiguous()
        if whole.dtype not in (torch.float32, torch.int64) or whole.device.type != "cpu":
            raise NeverCompiled(f"a weight of the head is {whole.dtype} on {whole.device.type}")
        self._kept.append(whole)
        return whole.data_ptr()

    def _linear(self, given: Weights | None) -> _Linear:
        if given is None:
            return _Linear()
        weight, bias = given
        panels = self._memory.place(smallest_panels(weight, self._panel_width))
        self._kept.append(panels)
        at_bias = 0 if bias is None else self._table(bias)
        is_bfloat16 = panels.dtype is torch.bfloat16
        return _Linear(panels.data_ptr(), at_bias, weight.shape[1], weight.shape[0], is_bfloat16)


def _embeddings(parts: HeadParts, vocabulary_size: int) -> Tensor:
    """The table of embeddings. Raises NeverCompiled for embeddings that are no plain table of all ids."""
    if type(parts.embed) is not nn.Embedding:
        raise NeverCompiled(f"the embeddings are a {type(parts.embed).__name__}, no plain table")
    table = parts.embed.weight.detach()
    if len(table) < vocabulary_size:
        raise NeverCompiled(f"{len(table)} of {vocabulary_size} ids have embeddings")
    return table


def _products(parts: HeadParts) -> dict[str, Weights | None]:
    """Weights of each product, by name. Raises NeverCompiled for parts that the kernel does not compute."""
    attention, mlp = parts.layer.self_attn, parts.layer.mlp
    if mlp.activation != "silu":
        raise NeverCompiled(f"the kernel computes silu alone, and the head's MLP has {mlp.activation}")
    found = {
        "fusion": _weights(parts.fusion),
        "projection": _weights(parts.projection),
        "query": _weights(attention.q_proj),
        "keys_values": _stacked(attention.k_proj, attention.v_proj),
        "output": _weights(attention.o_proj),
        "gate_up": _stacked(mlp.gate_proj, mlp.up_proj),
        "down": _weights(mlp.down_proj),
        "lm_head": _weights(parts.lm_head),
    }
    size = sum(4 * each[0].numel() for each in found.values() if each is not None)
    if size > _MOST_BYTES:
        raise NeverCompiled(
            f"its weights of {size >> 20} MiB would be kept twice; {_MOST_BYTES >> 20} MiB is the most"
        )
    return found


def _weights(layer: Callable[[Tensor], Tensor] | None) -> Weights | None:
    """Weight and bias of a linear layer. Raises NeverCompiled for another kind of layer."""
    if layer is None:
        return None
    if not isinstance(layer, nn.Linear | PackedLinear):
        raise NeverCompiled(f"the output layer is a {type(layer).__name__}, no linear layer")
    return layer.weight.detach(), None if layer.bias is None else layer.bias.detach()


def _stacked(*layers: nn.Linear) -> Weights:
    """Weight and bias of layers with one input as those of one layer."""
    biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
    return torch.cat([layer.weight.detach() for layer in layers]), torch.cat(biases) if biases else None
