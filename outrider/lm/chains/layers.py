"""The library's cache layers of one session: keys and values in the pool's slots, states of their own.

A layer of attention writes its new keys and values to the session's slots and gets all of the session's
back, as the library's own layer does. A recurrent or convolutional layer keeps the library's tensors; a
`State` is a copy of all of them at one position.
"""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.cache_utils import (
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from outrider.lm import transfer
from outrider.lm.kv.pool import SlotPool
from outrider.lm.kv.table import SlotTable

State = tuple[LinearAttentionLayer, ...]
"""Recurrent and convolutional states behind one position, in order of the layers that have them. Nothing
changes a state once it is made: a call runs on a copy."""

_KNOWN = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    DummyLayer,
)
_TENSORS = ("conv_states", "recurrent_states")
_FLAGS = ("is_conv_states_initialized", "is_recurrent_states_initialized", "has_previous_state")


class UnknownLayer(Exception):
    """A model's cache has layers of a kind that chains do not know."""


class CallSlots:
    """The slots of one session in one call of the model: where its rows are stored, and what they see."""

    def __init__(self, pool: SlotPool, table: SlotTable, low: int, high: int) -> None:
        """The call's rows are the positions ``[low, high)``.

        Positions before ``table.length`` are stored and are not written again: their blocks may have other
        holders.
        """
        self.low, self.high = low, high
        self._planes = pool.planes()
        self._skip = max(0, table.length - low)
        slots = table.slots(low + self._skip, high)
        (self._slots,) = transfer.indices([slots], pool.layout.device)
        self._seen = pool.seen(table.runs(0, high))

    def store(
        self, plane: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores a layer's new keys and values, ``[1, heads, rows, width]``; returns all of the session."""
        for at, new in ((plane, keys), (plane + 1, values)):
            self._planes[at].index_copy_(1, self._slots, new[0, :, self._skip :])
        return self._seen[plane], self._seen[plane + 1]


class _Stored:
    """The part of a cache layer that keeps keys and values in a session's slots. `attach` precedes a call."""

    plane: int
    is_sliding: bool
    _slots: CallSlots | None = None

    def attach(self, slots: CallSlots) -> None:
        """Sets the slots of the next call."""
        self._slots = slots
        self._length = slots.low
        self.is_initialized = True

    def detach(self) -> None:
        """Lets go of the slots: a state that is kept must not keep storage that the pool has replaced."""
        self._slots = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores the new keys and values; returns those of all the session's positions."""
        assert self._slots is not None, "`attach` precedes a call"
        self._length = self._slots.high
        return self._slots.store(self.plane, key_states, value_states)

    def get_seq_length(self) -> int:
        """Number of positions stored."""
        return self._length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of keys that a mask covers, and the position of the first: a window never drops keys."""
        return self._length + query_length, 0


class StoredLayer(_Stored, DynamicLayer):
    """A layer of attention."""


# The library declares some attributes of the two kinds differently.
class StoredStateLayer(_Stored, LinearAttentionAndFullAttentionLayer):  # type: ignore[misc,override]
    """A layer that has both attention and a state."""


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What one layer of a model keeps."""

    plane: int | None
    """Plane of its keys in the pool's layout, those of its values are the next; None: it does not attend."""
    sliding: bool
    states: int
    """Number of its states; 0: none."""

    def make(self) -> StoredLayer | StoredStateLayer | LinearAttentionLayer | DummyLayer:
        """A layer that keeps nothing yet."""
        if self.plane is None:
            return LinearAttentionLayer(number_of_states=self.states) if self.states else DummyLayer()
        kind: Any = StoredStateLayer if self.states else StoredLayer
        layer: StoredLayer | StoredStateLayer = kind(number_of_states=self.states)
        layer.plane, layer.is_sliding = self.plane, self.sliding
        return layer


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What a model keeps of a session: planes of keys and values, and states of constant size."""

    kinds: tuple[LayerKind, ...]
    planes: tuple[tuple[int, int], ...]
    """(heads, width) of each plane, as in KVLayout."""
    dtypes: frozenset[torch.dtype]
    """dtypes of keys and values."""
    state_bytes: int
    """Size of one state, in bytes; 0: the model has none."""

    def open(self, state: State | None) -> "OpenCache":
        """A cache for calls of one session that go on from ``state``; None: from the session's first id."""
        before = iter(state or ())
        layers = [_forked(next(before)) if kind.states and state else kind.make() for kind in self.kinds]
        return OpenCache(layers)


class OpenCache:
    """The library's cache of one session during a pass."""

    def __init__(self, layers: Sequence[Any]) -> None:
        self.cache = Cache(layers=list(layers))
        """The object that the model's forward takes."""
        self._stored = [layer for layer in layers if isinstance(layer, _Stored)]
        self._states = tuple([layer for layer in layers if isinstance(layer, LinearAttentionLayer)])

    def attach(self, slots: CallSlots) -> None:
        """Sets the slots of the next call."""
        for layer in self._stored:
            layer.attach(slots)

    def state(self, final: bool) -> State:
        """The state behind the rows that were run; ``final``: no call follows, so nothing is copied."""
        if not final:
            return tuple([_forked(layer) for layer in self._states])
        for layer in self._stored:
            layer.detach()
        return self._states


def _forked(layer: LinearAttentionLayer) -> LinearAttentionLayer:
    twin = copy(layer)
    if isinstance(twin, _Stored):
        twin.detach()
    for name in _TENSORS:
        held: dict[int, torch.Tensor | None] = getattr(layer, name)
        setattr(twin, name, {at: None if one is None else one.clone() for at, one in held.items()})
    for name in (*_FLAGS, "conv_kernel_size"):
        setattr(twin, name, dict(getattr(layer, name)))
    return twin


def watch(run: Callable[[DynamicCache], object], config: PreTrainedConfig) -> CacheShape:
    """What a model keeps, found by having ``run`` send one row through it with the library's own cache.

    Raises UnknownLayer for a kind of layer that cannot be kept here.
    """
    cache = DynamicCache(config=config)
    run(cache)
    kinds: list[LayerKind] = []
    planes: list[tuple[int, int]] = []
    dtypes: set[torch.dtype] = set()
    size = 0
    for layer in cache.layers:
        if type(layer) not in _KNOWN:
            raise UnknownLayer(type(layer).__name__)
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        plane = None
        if keys is not None and values is not None:
            plane = len(planes)
            planes += [(keys.shape[1], keys.shape[3]), (values.shape[1], values.shape[3])]
            dtypes |= {keys.dtype, values.dtype}
        held = _tensors(layer)
        size += sum(one.numel() * one.itemsize for one in held)
        states: int = getattr(layer, "number_of_states", 0) if held else 0
        kinds.append(LayerKind(plane, bool(getattr(layer, "is_sliding", False)), states))
    return CacheShape(tuple(kinds), tuple(planes), frozenset(dtypes), size)


def _tensors(layer: object) -> Sequence[torch.Tensor]:
    """The states that a cache layer holds."""
    held = [one for name in _TENSORS for one in getattr(layer, name, {}).values()]
    return [one for one in held if one is not None]
