"""Keys and values of every session, in slots: one tensor for all layers that agree in heads and width.

Storage is ``[planes, heads, slots, width]``; a layer has two planes, keys and values. Slots come in blocks,
which sessions may share. A table's slots are few runs of slots; where they are one run, a layer attends over
a view. The pool knows nothing about tokens, trees or positions.

On a CPU, a pool takes addresses for all slots that it may ever have. Slots that nobody has written take no
memory, so the pool grows without a copy; a copy would hold up every session.

A guest, such as a drafting layer outside the model, may have planes of its own behind the model's. Copies,
shared blocks, eviction and growth treat all planes alike. The model's planes may hold int8 with a scale for
each row and head; guests' never do.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from outrider.lm import transfer
from outrider.lm.kv.blocks import BLOCK, BlockAllocator, slots_of
from outrider.lm.kv.int8_plane import SCALE_BYTES, DequantisedPlanes, Int8Plane
from outrider.lm.kv.table import SlotTable
from speculative.errors import Overloaded

_RETRY_AFTER_S = 1.0

EAGER, COMPILED = "eager", "compiled"
"""Kinds of passes that write slots."""

Run = tuple[int, int]
"""A run of slots ``[low, high)``."""


@dataclass(frozen=True, slots=True)
class GuestRoom:
    """Room that a guest of the pool wants beside the model's keys and values."""

    planes: tuple[tuple[int, int], ...] = ()
    """(heads, width) of each plane; a layer of attention wants two, for its keys and for its values."""
    features: int = 0
    """Number of the model's hidden states that are kept for the last row of each block."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape, dtype and device of the keys and values that a model's layers, and guests, cache."""

    planes: tuple[tuple[int, int], ...]
    """(heads, width) of a layer's keys at ``2 * layer``, of its values at the next index; then guests'."""
    dtype: torch.dtype
    device: torch.device
    guests: int = 0
    """Number of planes, the last ones, that belong to guests."""
    tail: int = 0
    """Number of values that a guest keeps beside each block."""
    int8: bool = False
    """Whether the model's planes hold int8; ``dtype`` is then that of the rows that are written and read."""
    weights: str = ""
    """Format of the model's weights where it is not that of the passes; part of the name of a cached prefix.
    """

    @property
    def layers(self) -> int:
        """Number of the model's layers that cache keys and values."""
        return (len(self.planes) - self.guests) // 2

    @property
    def slot_bytes(self) -> int:
        """Size of one token's share of the storage, over all planes and with its part of a tail, in bytes."""
        rows = sum(
            heads * (width + SCALE_BYTES if self.is_int8(plane) else width * self.dtype.itemsize)
            for plane, (heads, width) in enumerate(self.planes)
        )
        return rows + -(-self.tail // BLOCK) * self.dtype.itemsize

    def is_int8(self, plane: int) -> bool:
        """Whether the plane of this index holds int8."""
        return self.int8 and plane < len(self.planes) - self.guests

    def with_guest(self, room: GuestRoom, width: int) -> "KVLayout":
        """This layout with room for a guest; ``width`` is that of the model's hidden states."""
        return replace(
            self,
            planes=self.planes + room.planes,
            guests=self.guests + len(room.planes),
            tail=self.tail + room.features * width,
        )


@dataclass(frozen=True, slots=True)
class _Group:
    """Planes of one shape and kind, which share tensors; ``members`` are their indices in the layout."""

    shape: tuple[int, int]
    int8: bool
    members: tuple[int, ...]
    storage: list[torch.Tensor] = field(default_factory=list)
    """``[members, heads, slots, width]``, and of int8 the scales as well; slots are always the third."""

    def has_slots(self, count: int) -> bool:
        """Whether the storage has this many slots, whoever uses them."""
        return bool(self.storage) and self.storage[0].shape[2] >= count


class SlotPool:
    """Slots for the keys and values of all sessions of one model. The engine thread alone may use a pool."""

    chains_only = False
    """Whether a pass runs no branches: a session's rows are one chain."""

    def __init__(self, layout: KVLayout, max_slots: int, initial_slots: int = 1024) -> None:
        """``max_slots`` bounds the slots in use, which start with ``initial_slots`` and double as needed."""
        self.layout = layout
        self.max_blocks = max(1, max_slots // BLOCK)
        self.evict: Callable[[int], int] = lambda blocks: 0
        """Called with the number of missing blocks when the pool is full; returns the number freed."""
        self.grown: Callable[[int], None] = lambda blocks: None
        """Called with the number of blocks that have storage, whenever it changes."""
        self.copying_blocks: Callable[[Sequence[int], Sequence[int]], None] = lambda sources, targets: None
        """Called with the source and the target blocks before blocks are copied for another session."""
        self.copied: Callable[[Sequence[int], Sequence[int]], None] = lambda sources, targets: None
        """Called with the source and the target slots of every copy."""
        self.deferred: dict[int, int] | None = None
        """Copies put off until `settle`, source slot by target slot; None: copies are made at once."""
        self.numerics = self._class(EAGER)
        """Numerics class of the passes that write slots now; part of the name of a cached prefix."""
        self._classes = 0
        members: dict[tuple[tuple[int, int], bool], list[int]] = defaultdict(list)
        for plane, shape in enumerate(layout.planes):
            members[shape, layout.is_int8(plane)].append(plane)
        self._groups = tuple(_Group(shape, int8, tuple(of)) for (shape, int8), of in members.items())
        self.blocks = BlockAllocator(0)
        """Allocator of the blocks that have storage."""
        self._planes: list[torch.Tensor] = [torch.empty(0)] * len(layout.planes)
        self._tails = torch.empty(0, layout.tail, dtype=layout.dtype, device=layout.device)
        self.grow(min(-(-initial_slots // BLOCK), self.max_blocks))

    @property
    def max_slots(self) -> int:
        """Largest number of slots that the pool may have."""
        return self.max_blocks * BLOCK

    @property
    def slots(self) -> int:
        """Number of slots that blocks have been made of so far."""
        return self.blocks.capacity * BLOCK

    @property
    def most_tables(self) -> int:
        """Largest number of sessions that may have tables at once; slots alone bound it here."""
        return self.max_blocks

    def table(self, room: int = 0) -> SlotTable:
        """A table for a new session, which may come to need ``room`` slots in all."""
        return SlotTable(self, room)

    def resumable(self, blocks: Sequence[int]) -> Sequence[int]:
        """The longest beginning of a cached prefix behind which a session can go on: here all of it."""
        return blocks

    def same(self, cached: int, own: int) -> None:
        """Notes that two blocks hold the same ids behind the same ids, of which the first is cached."""

    @property
    def used_slots(self) -> int:
        """Number of slots in blocks that have a holder."""
        return (self.blocks.capacity - self.blocks.free) * BLOCK

    @property
    def free_blocks(self) -> int:
        """Number of blocks without a holder, including those that the pool may still grow by."""
        return self.blocks.free + self.max_blocks - self.blocks.capacity

    def begin_class(self, kind: str) -> None:
        """Begins a numerics class of its own: passes of this kind write slots from now on.

        Kinds that come back are new classes, since slots of running sessions hold what both kinds wrote.
        """
        self._classes += 1
        self.numerics = f"{self._class(kind)} {self._classes}"

    def has_room(self, blocks: int) -> bool:
        """Whether a copy of ``blocks`` blocks into one run leaves more than half of the pool free.

        Always False where a kernel reads pages (copies are deferred then): such a kernel gains nothing by a
        run.
        """
        return self.deferred is None and self.free_blocks - blocks > self.max_blocks // 2

    @property
    def scratch(self) -> int:
        """Index of the slot behind all others in use, which takes padding and is never read."""
        return self.slots

    def bytes(self) -> int:
        """Size of the storage of these slots, in bytes."""
        return self.slots * self.layout.slot_bytes

    def take(self, count: int, after: int | None = None, room: int = 0) -> list[int]:
        """Takes ``count`` blocks for one holder; see `BlockAllocator.take`.

        The pool grows its storage, while it may, before it hands out blocks in pieces. Raises Overloaded,
        with nothing changed but evictions, where too few blocks are free.
        """
        if self.free_blocks < count:
            self.evict(count - self.free_blocks)
        if self.free_blocks < count:
            raise Overloaded(
                f"a session needs {count} more KV blocks of {BLOCK} tokens; {self.free_blocks} of "
                f"{self.max_blocks} are free",
                retry_after_s=_RETRY_AFTER_S,
            )
        may_grow = self.blocks.capacity < self.max_blocks and not self.blocks.is_free_behind(after, count)
        if may_grow and self.blocks.longest_run() < max(count, room):
            self.grow(min(max(2 * self.blocks.capacity, count), self.max_blocks))
        taken = self.blocks.take(count, after, room)
        while taken is None:
            self.grow(min(self.blocks.capacity + count, self.max_blocks))
            taken = self.blocks.take(count, after, room)
        return taken

    def views(self, low: int, high: int) -> Sequence[torch.Tensor]:
        """The slots ``[low, high)`` of each plane as views ``[1, heads, high - low, width]``.

        Views of int8 take rows and give none: read them through `seen`.
        """
        if len(self._groups) == 1:
            return self._cut(self._groups[0], low, high)
        found: list[torch.Tensor] = [torch.empty(0)] * len(self.layout.planes)
        for group in self._groups:
            for plane, view in zip(group.members, self._cut(group, low, high), strict=True):
                found[plane] = view
        return found

    def seen(self, runs: Sequence[Run]) -> Sequence[torch.Tensor]:
        """Keys and values in these runs of slots, one tensor per plane.

        A single run gives views; several runs are concatenated when indexed, and int8 becomes floats then.
        """
        parts = [self.views(*run) for run in runs]
        if self.layout.int8:
            parts = [DequantisedPlanes(part) for part in parts]
        return parts[0] if len(parts) == 1 else _Stitched(parts)

    def planes(self) -> Sequence[torch.Tensor]:
        """All slots of each plane as views ``[heads, slots + 1, width]``; the last slot is `scratch`.

        Views may be longer, with slots behind that one that are not in use yet.
        A view of int8 takes rows, and gives those that are selected; see `Int8Plane`.
        """
        return self._planes

    @torch.inference_mode()
    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies slots to slots: one index operation for all layers, put off where copies are deferred."""
        if self.deferred is not None:
            # All slots are read before any is written, so a slot yet to be written stands for its source.
            found = [self.deferred.get(slot, slot) for slot in sources]
            self.deferred.update(zip(targets, found, strict=True))
            return
        self.move(*transfer.indices([list(targets), list(sources)], self.layout.device))
        self.copied(sources, targets)

    @torch.inference_mode()
    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies blocks, and what is kept beside them, to as many other blocks.

        Copies neighbouring blocks together, faster than `copy` copies slots: every session waits for it.
        """
        self.copying_blocks(sources, targets)
        slots, into = slots_of(sources), slots_of(targets)
        if self.deferred is not None:
            self.copy(slots, into)
        else:
            for source, target, count in _common_runs(sources, targets):
                self._copy_run(source * BLOCK, target * BLOCK, count * BLOCK)
            self.copied(slots, into)
        self.copy_tails(sources, targets)

    @torch.inference_mode()
    def settle(self) -> None:
        """Makes the deferred copies, all of them or none; call it before slots are read or written."""
        if copies := self.deferred:
            self.move(*transfer.indices([list(copies.keys()), list(copies.values())], self.layout.device))
            self.clear_deferred()

    def clear_deferred(self) -> None:
        """Forgets the deferred copies, which have been made."""
        self.deferred = {}

    def tail(self, block: int) -> torch.Tensor:
        """What is kept beside a block, ``[tail]``: a view."""
        return self._tails[block]

    @torch.inference_mode()
    def write_tails(self, blocks: Sequence[int], tails: torch.Tensor) -> None:
        """Keeps ``tails``, ``[blocks, tail]``, beside these blocks."""
        (targets,) = transfer.indices([list(blocks)], self.layout.device)
        self._tails.index_copy_(0, targets, tails.to(self._tails.dtype))

    def copy_tails(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies what is kept beside the source blocks to the target blocks."""
        if self.layout.tail and sources:
            (found,) = transfer.indices([list(sources)], self.layout.device)
            self.write_tails(targets, self._tails[found])

    def move(self, targets: torch.Tensor, sources: torch.Tensor) -> None:
        """Copies slots to slots, int64 indices on the device; all slots are read before any is written.

        Only reading takes memory, so without enough memory nothing is written.
        """
        storages = [storage for group in self._groups for storage in group.storage]
        found = [storage.index_select(2, sources) for storage in storages]
        for storage, rows in zip(storages, found, strict=True):
            storage.index_copy_(2, targets, rows)

    def fit(self, max_slots: int) -> None:
        """Sets the bound of the storage, and allocates all of it; what has storage already stays."""
        self.max_blocks = max(self.blocks.capacity, max_slots // BLOCK)
        if self.max_blocks > self.blocks.capacity:
            self.grow(self.max_blocks)

    def check_integrity(self, held: Iterable[Sequence[int]] = ()) -> None:
        """Raises AssertionError unless ``held``, lists of blocks, name every holder (default: no holder)."""
        self.blocks.check(held)

    @torch.inference_mode()
    def grow(self, blocks: int) -> None:
        """Grows the storage to ``blocks`` blocks in all; existing slots keep their indices and contents."""
        device, dtype = self.layout.device, self.layout.dtype
        for group in self._groups:
            if not group.has_slots(blocks * BLOCK + 1):
                self._move_group(group, self._reserved(group, blocks))
        tails = torch.empty(blocks, self.layout.tail, dtype=dtype, device=device)
        tails[: len(self._tails)] = self._tails
        self._tails = tails
        self.blocks.grow(blocks)
        self.grown(blocks)

    def _move_group(self, group: _Group, new: list[torch.Tensor]) -> None:
        """Puts a group into new storage; its slots keep their indices and contents."""
        for larger, storage in zip(new, group.storage, strict=False):
            larger[:, :, : self.slots] = storage[:, :, : self.slots]
        group.storage[:] = new
        for plane, view in zip(group.members, self._cut(group), strict=True):
            self._planes[plane] = view

    def _copy_run(self, source: int, target: int, count: int) -> None:
        """Copies ``count`` slots from slot ``source`` on to others, from slot ``target`` on."""
        for group in self._groups:
            for storage in group.storage:
                storage[:, :, target : target + count] = storage[:, :, source : source + count]

    def _reserved(self, group: _Group, blocks: int) -> list[torch.Tensor]:
        """New storage of a group for ``blocks`` blocks; on a CPU for as many as the pool may ever have."""
        if self.layout.device.type == "cpu" and blocks < self.max_blocks:
            # Where the system has too few addresses for the bound, the storage grows by copies.
            with suppress(RuntimeError):
                return self._allocate(group, self.max_blocks * BLOCK + 1)
        return self._allocate(group, blocks * BLOCK + 1)

    def _allocate(self, group: _Group, slots: int) -> list[torch.Tensor]:
        """New storage of a group, with nothing in it."""
        heads, width = group.shape
        shape, device = (len(group.members), heads, slots), self.layout.device
        if not group.int8:
            return [torch.empty(*shape, width, dtype=self.layout.dtype, device=device)]
        codes = torch.empty(*shape, width, dtype=torch.int8, device=device)
        return [codes, torch.empty(*shape, 1, dtype=torch.float32, device=device)]

    def _cut(self, group: _Group, low: int = 0, high: int | None = None) -> Sequence[torch.Tensor]:
        """Slots of each member's plane; the views of a run have a batch of one in front."""
        parts = [storage if high is None else storage[:, None, :, low:high] for storage in group.storage]
        if not group.int8:
            return parts[0].unbind(0)
        dtype = self.layout.dtype
        codes, scales = (part.unbind(0) for part in parts)
        return [Int8Plane(*both, dtype).as_tensor() for both in zip(codes, scales, strict=True)]

    def _class(self, kind: str) -> str:
        """The name of passes of this kind over this pool."""
        parts = kind, self.layout.weights, "int8" if self.layout.int8 else ""
        return " ".join(part for part in parts if part)


def _common_runs(sources: Sequence[int], targets: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Cuts two lists of as many blocks where either has a gap: first source, first target, and number."""
    first = 0
    for at in range(1, len(sources) + 1):
        if at == len(sources) or (sources[at], targets[at]) != (sources[at - 1] + 1, targets[at - 1] + 1):
            yield sources[first], targets[first], at - first
            first = at


class _Stitched(Sequence[torch.Tensor]):
    """Planes whose slots lie in several runs; each layer reads each of its two planes once, after writing."""

    def __init__(self, parts: Sequence[Sequence[torch.Tensor]]) -> None:
        self._parts = parts

    def __len__(self) -> int:
        return len(self._parts[0])

    def __getitem__(self, plane: Any) -> Any:
        return torch.cat([part[plane] for part in self._parts], dim=2)
