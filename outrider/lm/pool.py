"""Keys and values of every session, in slots: one tensor for all layers that agree in heads and width.

Storage is ``[planes, heads, slots, width]``; a layer has two planes, keys and values. A session's slots lie
in one contiguous range, so what a layer attends over is a view. The pool knows nothing about tokens, trees or
positions.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from outrider.lm.ranges import RangeAllocator
from speculative.errors import Overloaded

BLOCK = 64
"""Ranges are whole multiples of this many slots."""

_RETRY_AFTER_S = 1.0


@dataclass(slots=True, eq=False)
class SlotRange:
    """The slots ``[start, start + size)`` of one session. Only the pool changes it."""

    start: int = 0
    size: int = 0


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
        self.max_slots = max_slots
        members: dict[tuple[int, int], list[int]] = defaultdict(list)
        for plane, shape in enumerate(layout.planes):
            members[shape].append(plane)
        self._groups = tuple(_Group(shape, tuple(of)) for shape, of in members.items())
        self._ranges: dict[int, SlotRange] = {}
        self._lay_out(min(_blocks(initial_slots), max_slots))

    @property
    def slots(self) -> int:
        """Slots that storage exists for now."""
        return self._allocator.capacity

    @property
    def used_slots(self) -> int:
        """Slots that belong to a session."""
        return self._allocator.capacity - self._allocator.free

    @property
    def free_slots(self) -> int:
        """Slots that sessions may still take, counting what the pool may grow by."""
        return self.max_slots - self.used_slots

    def bytes(self) -> int:
        """Bytes of storage held now."""
        return self.slots * self.layout.slot_bytes

    def open(self) -> SlotRange:
        """A new empty range."""
        slots = SlotRange()
        self._ranges[id(slots)] = slots
        return slots

    def close(self, slots: SlotRange) -> None:
        """Gives the range back; a second call does nothing."""
        if self._ranges.pop(id(slots), None) is not None and slots.size:
            self._allocator.give(slots.start, slots.size)
            slots.size = 0

    def reserve(self, slots: SlotRange, need: int) -> None:
        """Makes the range at least ``need`` slots long, keeping its contents.

        Raises Overloaded, with nothing changed, if ``max_slots`` does not allow it.
        """
        if need <= slots.size:
            return
        wanted = _blocks(max(need, slots.size + slots.size // 2))
        for size in dict.fromkeys((wanted, _blocks(need), need)):
            if self._resize(slots, size):
                return
        raise Overloaded(
            f"a session needs {need} KV slots; {self.free_slots} of {self.max_slots} are free",
            retry_after_s=_RETRY_AFTER_S,
        )

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

    def planes(self) -> Sequence[torch.Tensor]:
        """Per plane all slots as a view ``[heads, slots, width]``."""
        return self._planes

    @torch.inference_mode()
    def gather(self, sources: Sequence[int], target: int) -> None:
        """Copies slots ``sources`` (ascending) to ``target``, ``target + 1``, …: one index operation for all
        layers."""
        index = torch.tensor(sources, device=self.layout.device)
        for group in self._groups:
            storage = group.storage[0]
            storage[:, :, target : target + len(sources)] = storage.index_select(2, index)

    def check_integrity(self) -> None:
        """Raises AssertionError if a slot is lost or owned twice."""
        taken = [(slots.start, slots.size) for slots in self._ranges.values() if slots.size]
        self._allocator.check(taken)

    def _resize(self, slots: SlotRange, size: int) -> bool:
        extra = size - slots.size
        if extra > self.free_slots:
            return False
        if slots.size and self._allocator.extend(slots.start + slots.size, extra):
            slots.size = size
            return True
        if self._move(slots, size):
            return True
        need = self.used_slots + size
        grown = min(max(need, 2 * self.slots), self.max_slots)
        self._lay_out(grown, last=slots, last_size=size)
        return True

    @torch.inference_mode()
    def _move(self, slots: SlotRange, size: int) -> bool:
        start = self._allocator.take(size)
        if start is None:
            return False
        if slots.size:
            for group in self._groups:
                storage = group.storage[0]
                old = storage[:, :, slots.start : slots.start + slots.size]
                storage[:, :, start : start + slots.size] = old
            self._allocator.give(slots.start, slots.size)
        slots.start, slots.size = start, size
        return True

    @torch.inference_mode()
    def _lay_out(self, capacity: int, last: SlotRange | None = None, last_size: int = 0) -> None:
        """New storage with the ranges one after another: growth and the cure of fragmentation in one."""
        order = [slots for slots in self._ranges.values() if slots is not last and slots.size]
        sizes = [slots.size for slots in order]
        if last is not None:
            order.append(last)
            sizes.append(last_size)
        starts = [sum(sizes[:at]) for at in range(len(sizes))]
        device, dtype = self.layout.device, self.layout.dtype
        for group in self._groups:
            heads, width = group.shape
            new = torch.empty(len(group.members), heads, capacity, width, dtype=dtype, device=device)
            for slots, start in zip(order, starts, strict=True):
                if slots.size:
                    old = group.storage[0][:, :, slots.start : slots.start + slots.size]
                    new[:, :, start : start + slots.size] = old
            group.storage[:] = [new]
        for slots, start, size in zip(order, starts, sizes, strict=True):
            slots.start, slots.size = start, size
        self._allocator = RangeAllocator(capacity, used=sum(sizes))
        self._planes: list[torch.Tensor] = [torch.empty(0)] * len(self.layout.planes)
        for group in self._groups:
            for plane, view in zip(group.members, group.storage[0].unbind(0), strict=True):
                self._planes[plane] = view


def _blocks(slots: int) -> int:
    return -(-slots // BLOCK) * BLOCK
