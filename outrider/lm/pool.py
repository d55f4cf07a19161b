"""Keys and values of every session, in slots: one tensor for all layers that agree in heads and width.

Storage is ``[planes, heads, slots, width]``; a layer has two planes, keys and values. Slots come in blocks,
which may be shared; a table's slots are few runs of them, and what a layer attends over is a view where there
is one run. The pool knows nothing about tokens, trees or positions.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from outrider.lm import transfer
from outrider.lm.blocks import BLOCK, BlockAllocator
from speculative.errors import Overloaded

_RETRY_AFTER_S = 1.0

Run = tuple[int, int]
"""Slots ``[low, high)``."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of what each layer caches: ``planes[2 * layer]`` is (heads, width) of its keys, the next of its
    values."""

    planes: tuple[tuple[int, int], ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def layers(self) -> int:
        """Number of layers that cache."""
        return len(self.planes) // 2

    @property
    def slot_bytes(self) -> int:
        """Bytes of one token's keys and values over all layers."""
        return sum(heads * width for heads, width in self.planes) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class _Group:
    """Planes of one shape share one tensor; ``members`` are their indices in the layout."""

    shape: tuple[int, int]
    members: tuple[int, ...]
    storage: list[torch.Tensor] = field(default_factory=list)


class SlotPool:
    """Slots for the keys and values of all sessions of one model. Not thread-safe: it belongs to the engine
    thread."""

    def __init__(self, layout: KVLayout, max_slots: int, initial_slots: int = 1024) -> None:
        """``max_slots`` bounds what it may ever hold; storage starts at ``initial_slots`` and doubles."""
        self.layout = layout
        self.max_blocks = max(1, max_slots // BLOCK)
        self.evict: Callable[[int], int] = lambda blocks: 0
        """Asked for blocks when all there may be are held; returns how many it gave back."""
        self.grown: Callable[[int], None] = lambda blocks: None
        """Told how many blocks there is storage for, whenever that changes."""
        self.copied: Callable[[Sequence[int], Sequence[int]], None] = lambda sources, targets: None
        """Told of every copy of slots to slots."""
        self.deferred: dict[int, int] | None = None
        """Copies put off until `settle`, target slot to source; None where a copy is made at once."""
        members: dict[tuple[int, int], list[int]] = defaultdict(list)
        for plane, shape in enumerate(layout.planes):
            members[shape].append(plane)
        self._groups = tuple(_Group(shape, tuple(of)) for shape, of in members.items())
        self.blocks = BlockAllocator(0)
        """Of the storage there is."""
        self._planes: list[torch.Tensor] = [torch.empty(0)] * len(layout.planes)
        self.grow(min(-(-initial_slots // BLOCK), self.max_blocks))

    @property
    def max_slots(self) -> int:
        """Slots that there may be in all."""
        return self.max_blocks * BLOCK

    @property
    def slots(self) -> int:
        """Slots that storage exists for now."""
        return self.blocks.capacity * BLOCK

    @property
    def used_slots(self) -> int:
        """Slots of the blocks that somebody holds."""
        return (self.blocks.capacity - self.blocks.free) * BLOCK

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody holds, counting those that the pool may grow by."""
        return self.blocks.free + self.max_blocks - self.blocks.capacity

    def has_room(self, blocks: int) -> bool:
        """Whether there is so much free that a run of so many blocks is nothing to save.

        Never where a kernel reads pages (whose copies are deferred): to it a run is worth nothing.
        """
        return self.deferred is None and self.free_blocks - blocks > self.max_blocks // 2

    @property
    def scratch(self) -> int:
        """A slot behind all others that nobody reads: where padding is written."""
        return self.slots

    def bytes(self) -> int:
        """Bytes of storage held now."""
        return self.slots * self.layout.slot_bytes

    def take(self, count: int, after: int | None = None, room: int = 0) -> list[int]:
        """Blocks for one holder; see BlockAllocator.

        Storage grows while it may before what is free is taken in pieces. Raises Overloaded, with nothing
        changed but evictions, where there are too few.
        """
        if self.free_blocks < count:
            self.evict(count - self.free_blocks)
        if self.free_blocks < count:
            raise Overloaded(
                f"a session needs {count} more KV blocks of {BLOCK} tokens; {self.free_blocks} of "
                f"{self.max_blocks} are free",
                retry_after_s=_RETRY_AFTER_S,
            )
        if self.blocks.capacity < self.max_blocks and self.blocks.longest_run() < max(count, room):
            self.grow(min(max(2 * self.blocks.capacity, count), self.max_blocks))
        taken = self.blocks.take(count, after, room)
        while taken is None:
            self.grow(min(self.blocks.capacity + count, self.max_blocks))
            taken = self.blocks.take(count, after, room)
        return taken

    def views(self, low: int, high: int) -> Sequence[torch.Tensor]:
        """Per plane the slots ``[low, high)`` as a view ``[1, heads, high - low, width]``."""
        if len(self._groups) == 1:
            return self._groups[0].storage[0][:, :, low:high].unsqueeze(1).unbind(0)
        found: list[torch.Tensor] = [torch.empty(0)] * len(self.layout.planes)
        for group in self._groups:
            cut = group.storage[0][:, :, low:high].unsqueeze(1).unbind(0)
            for plane, view in zip(group.members, cut, strict=True):
                found[plane] = view
        return found

    def seen(self, runs: Sequence[Run]) -> Sequence[torch.Tensor]:
        """Per plane the slots of these runs in order: views of one run, else put together when asked for."""
        return self.views(*runs[0]) if len(runs) == 1 else _Stitched([self.views(*run) for run in runs])

    def planes(self) -> Sequence[torch.Tensor]:
        """Per plane all slots as a view ``[heads, slots + 1, width]``; the last one is `scratch`."""
        return self._planes

    @torch.inference_mode()
    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies slots to slots: one index operation for all layers, put off where copies are deferred."""
        if self.deferred is not None:
            # All are read before any is written, so a slot that is yet to be written stands for its source.
            found = [self.deferred.get(slot, slot) for slot in sources]
            self.deferred.update(zip(targets, found, strict=True))
            return
        self.move(*transfer.indices([list(targets), list(sources)], self.layout.device))
        self.copied(sources, targets)

    @torch.inference_mode()
    def settle(self) -> None:
        """Makes the copies that were put off: to be called before slots are read or written."""
        if copies := self.take_deferred():
            self.move(*transfer.indices([list(copies.keys()), list(copies.values())], self.layout.device))

    def take_deferred(self) -> dict[int, int]:
        """The copies put off so far, target to source, for the caller to make."""
        if not self.deferred:
            return {}
        taken, self.deferred = self.deferred, {}
        return taken

    def move(self, targets: torch.Tensor, sources: torch.Tensor) -> None:
        """Copies slots to slots, int64 indices on the device: all are read before any is written."""
        for group in self._groups:
            storage = group.storage[0]
            storage.index_copy_(2, targets, storage.index_select(2, sources))

    def check_integrity(self, held: Iterable[Sequence[int]] = ()) -> None:
        """Raises AssertionError if a block is lost, or held by others than these (default: nobody)."""
        self.blocks.check(held)

    @torch.inference_mode()
    def grow(self, blocks: int) -> None:
        """Storage for so many blocks in all, more than before; what there is keeps its slots."""
        device, dtype = self.layout.device, self.layout.dtype
        for group in self._groups:
            heads, width = group.shape
            shape = (len(group.members), heads, blocks * BLOCK + 1, width)
            new = torch.empty(shape, dtype=dtype, device=device)
            if group.storage:
                new[:, :, : self.slots] = group.storage[0][:, :, : self.slots]
            group.storage[:] = [new]
            for plane, view in zip(group.members, new.unbind(0), strict=True):
                self._planes[plane] = view
        self.blocks.grow(blocks)
        self.grown(blocks)


class _Stitched(Sequence[torch.Tensor]):
    """Planes whose slots lie in several runs. A layer asks for each of its two once, after it was written."""

    def __init__(self, parts: Sequence[Sequence[torch.Tensor]]) -> None:
        self._parts = parts

    def __len__(self) -> int:
        return len(self._parts[0])

    def __getitem__(self, plane: Any) -> Any:
        return torch.cat([part[plane] for part in self._parts], dim=2)
