"""The attention function and the cache object through which a model's own forward runs a packed pass.

transformers calls ``update`` on the cache and then the attention function, once each per layer. The
attention function writes the new keys and values to their slots and lets every session's rows attend over
that session's slots. The plan says which row may see which slot; this module knows nothing about trees.
"""

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from outrider.lm import transfer
from outrider.lm.kv.pool import SlotPool
from outrider.lm.plan import AttentionView, PassPlan
from speculative.errors import ModelRefused

ATTENTION = "outrider_packed"
"""Name of the attention function. No mask function has this name, so models create no masks."""

_HARMLESS = frozenset({"position_ids", "use_cache", "cache_position", "return_dict"})
"""Arguments that models pass on and that do not change attention, beside all named ``output_…``."""

_GROUPED_ROWS = 16
"""Largest number of rows for which query heads of one key head are stacked, so that keys are read once."""


class AttentionParams(NamedTuple):
    """Parameters of one layer's attention. A tuple, because one is made in every layer of every pass."""

    scaling: float | None
    """Factor of the scores; None: 1 / sqrt(head width)."""
    window: int | None
    """Sliding window in positions; None: no window."""
    softcap: float | None
    """Cap of the scores; None: no cap."""
    sinks: torch.Tensor | None
    """Attention sink of each query head; None: no sinks."""


class PackedCache:
    """The object that a model's forward uses as its KV cache during one pass.

    ``update`` returns the new rows' keys and values unchanged; the slots get the keys and values that the
    attention function receives afterwards. So whatever a family does to single rows in between (multi-head
    latent attention expands them) is part of the cache. The other methods answer questions that models ask
    before the first layer: positions and masks come from the plan, so models never use the sizes returned.
    """

    is_compileable = False
    is_sliding: Sequence[bool] = ()

    def __init__(self, model_type: str) -> None:
        self.model_type = model_type
        self.layers_done = 0
        self._owed: int | None = None

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The new keys and values of one layer, unchanged; that layer must attend next."""
        if self._owed is not None:
            raise self.refusal(f"layer {self._owed} does not attend through the attention interface")
        self._owed = layer_idx
        return keys, values

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        params: AttentionParams,
    ) -> torch.Tensor:
        """Attention output ``[1, rows, heads, width]`` of the next layer.

        ``keys`` and ``values`` are the layer's new ones.
        """
        if keys.shape[2] != query.shape[2] or values.shape[2] != query.shape[2]:
            raise self.refusal(
                f"layer {self.layers_done} attends over {keys.shape[2]} keys in a pass of {query.shape[2]}"
            )
        self._owed = None
        output = self.compute(query, keys, values, params, self.layers_done)
        self.layers_done += 1
        return output

    def compute(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        params: AttentionParams,
        layer: int,
    ) -> torch.Tensor:
        """Stores the new keys and values of ``layer``; returns its attention output."""
        raise NotImplementedError

    def finish(self, layers: int) -> None:
        """Checks that all ``layers`` layers attended in this pass; raises ModelRefused otherwise."""
        if self._owed is not None or self.layers_done != layers:
            raise self.refusal(
                f"{self.layers_done} of {layers} layers attend through the attention interface; "
                "recurrent layers and attention of a model's own cannot run a packed tree"
            )

    def refusal(self, why: str) -> ModelRefused:
        """The ModelRefused that gives ``why`` as the reason."""
        return ModelRefused(f"{self.model_type} is not served: {why}", self.model_type)

    def failure(self, error: Exception) -> ModelRefused:
        """The ModelRefused for a forward that raised ``error``."""
        name = f"{type(error).__name__}: {error}"
        if self._owed is not None:
            return self.refusal(
                f"layer {self._owed} does not attend through the attention interface ({name})"
            )
        return self.refusal(f"the packed pass fails with {name}")

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Cached length for transformers: zero, because passes give every position."""
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Query offset for transformers' masks: zero, because passes make no such masks."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Key length and offset for transformers' masks; passes make no such masks."""
        return query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Largest cached length for transformers; -1: no bound."""
        return -1

    def _recurrent(self, *_: Any, **__: Any) -> Any:
        """Refuses a recurrent layer: its state has one past, and a tree has many."""
        raise self.refusal("it has recurrent layers, whose state cannot follow the branches of a tree")

    has_previous_state = get_conv_state = update_conv_state = _recurrent
    get_recurrent_state = update_recurrent_state = _recurrent


class SlotCache(PackedCache):
    """The KV cache of one ragged pass over the slots of a pool."""

    def __init__(self, model_type: str, pool: SlotPool, plan: PassPlan) -> None:
        super().__init__(model_type)
        self._plan = plan
        runs = plan.written()
        self._single = len(runs) == 1
        if self._single:
            self._targets = pool.views(*runs[0])
        else:
            self._targets = pool.planes()
            slots = [slot for low, high in runs for slot in range(low, high)]
            (self._slots,) = transfer.indices([slots], pool.layout.device)

    def compute(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        params: AttentionParams,
        layer: int,
    ) -> torch.Tensor:
        """Writes to the rows' slots, then lets each session's rows attend over that session's slots."""
        plane = 2 * layer
        self._write(keys, values, plane)
        seen = self._plan.visible(params.window)
        attend = _attend_plain if params.softcap is None and params.sinks is None else _attend_exact
        if len(seen) == 1:
            return attend(query, seen[0], plane, params).transpose(1, 2).contiguous()
        parts = [attend(query[:, :, visible.low : visible.high], visible, plane, params) for visible in seen]
        return torch.cat(parts, dim=2).transpose(1, 2).contiguous()

    def _write(self, keys: torch.Tensor, values: torch.Tensor, plane: int) -> None:
        """Stores a layer's keys and values: by slice where the slots are one run, else by indexed copy."""
        targets = self._targets
        if self._single:
            targets[plane].copy_(keys)
            targets[plane + 1].copy_(values)
        else:
            targets[plane].index_copy_(1, self._slots, keys[0])
            targets[plane + 1].index_copy_(1, self._slots, values[0])


def _attend_plain(
    query: torch.Tensor, visible: AttentionView, plane: int, params: AttentionParams
) -> torch.Tensor:
    keys, values = visible.views[plane], visible.views[plane + 1]
    _, heads, rows, width = query.shape
    groups = heads // keys.shape[1]
    # On a GPU no fused kernel takes grouped heads and a mask; stacked, every kernel takes them.
    stacked = groups > 1 and not visible.causal and (rows <= _GROUPED_ROWS or query.is_cuda)
    if not stacked:
        return scaled_dot_product_attention(
            query,
            keys,
            values,
            attn_mask=visible.mask,
            is_causal=visible.causal,
            scale=params.scaling,
            enable_gqa=groups > 1,
        )
    grouped = query.reshape(1, keys.shape[1], groups * rows, width)
    mixed = scaled_dot_product_attention(
        grouped, keys, values, attn_mask=visible.mask_for(groups), scale=params.scaling
    )
    # Which kernel computed it decides how the result lies in memory.
    return mixed.reshape(1, heads, rows, values.shape[3])


def _attend_exact(
    query: torch.Tensor, visible: AttentionView, plane: int, params: AttentionParams
) -> torch.Tensor:
    """Attention written out for layers that fused kernels lack: capped scores (Gemma 2), sinks (gpt-oss)."""
    keys, values = visible.views[plane][0], visible.views[plane + 1][0]
    _, heads, rows, width = query.shape
    groups = heads // keys.shape[0]
    scale = width**-0.5 if params.scaling is None else params.scaling
    grouped = query.reshape(keys.shape[0], groups * rows, width)
    scores = torch.matmul(grouped, keys.transpose(1, 2)).view(heads, rows, -1) * scale
    if params.softcap is not None:
        scores = torch.tanh(scores / params.softcap) * params.softcap
    if visible.mask is not None:
        scores = scores + visible.mask
    elif visible.causal:
        scores = scores + torch.full_like(scores[0], float("-inf")).triu(1)
    if params.sinks is not None:
        sinks = params.sinks.view(heads, 1, 1).expand(heads, rows, 1)
        scores = torch.cat((scores, sinks.to(scores.dtype)), dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    if params.sinks is not None:
        weights = weights[..., :-1]
    mixed = torch.matmul(weights.reshape(keys.shape[0], groups * rows, -1), values)
    return mixed.view(1, heads, rows, -1)


class _Active(threading.local):
    cache: PackedCache | None = None


ACTIVE = _Active()
"""The cache of the pass that this thread runs. A thread-local, because not every family passes keyword
arguments down to its attention."""


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function for ``AttentionInterface``. Raises ModelRefused for unknown arguments."""
    cache = ACTIVE.cache
    if cache is None:
        raise RuntimeError("this model runs packed passes only; call it through outrider.lm.PackedLM")
    if others or attention_mask is not None or dropout or is_causal is False:
        _refuse_unknown(cache, attention_mask, dropout, is_causal, others)
    return cache.attend(query, key, value, AttentionParams(scaling, sliding_window, softcap, s_aux)), None


def _refuse_unknown(
    cache: PackedCache,
    mask: torch.Tensor | None,
    dropout: float,
    is_causal: bool | None,
    others: dict[str, Any],
) -> None:
    unknown = {
        name
        for name, value in others.items()
        if value is not None and name not in _HARMLESS and not name.startswith("output_")
    }
    if mask is not None:
        unknown.add("attention_mask")
    if dropout:
        unknown.add("dropout")
    if is_causal is False:
        unknown.add("is_causal=False")
    if unknown:
        raise cache.refusal(
            f"its attention takes {', '.join(sorted(unknown))}, which the packed pass does not know"
        )


AttentionInterface.register(ATTENTION, packed_attention)
