"""A CUDA device that computes nothing: torch's fake tensors, which know shapes, dtypes and devices.

Counts what a step launches, reads and copies. A read on the host raises, as nothing is there to read.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from transformers import AutoModelForCausalLM

from outrider.lm import norm, runner, transfer
from outrider.lm.attention.interface import AttentionParams
from outrider.lm.attention.metadata import AttentionMetadata
from outrider.lm.device.digest import RowDigester
from outrider.lm.device.placement import GpuOptions
from outrider.lm.graphs import backend_choice, graph_runner
from outrider.lm.graphs.inputs import GraphInputs
from outrider.lm.runner import PackedLM

KERNELS = 2
"""Kernels of a layer's attention: one attends, one joins."""
_LAUNCHES_NOTHING = ("aten.empty", "aten.new_empty", "aten.detach", "aten.alias", "prim.device")
_SPARSE = tuple(
    f"aten.{name}" for name in ("index_copy", "index_select", "index.", "gather", "embedding", "take")
)
"""Operations that touch as much memory as they give or take, however large the tensor that they index."""


@dataclass
class Work:
    """Counts of what a device was asked to do."""

    launches: Counter[str] = field(default_factory=Counter)
    """Operations that launch at least one kernel, by name."""
    bytes: int = 0
    """Bytes that the operations read and write."""
    operations: int = 0
    """Floating-point operations of the products."""
    between: list[str] = field(default_factory=list)
    """Operations that copy from one device to another, beside those of `transfer`."""
    up: list[int] = field(default_factory=list)
    """Sizes of the copies to the device, in bytes."""
    down: list[int] = field(default_factory=list)
    """Sizes of the copies to the host, in bytes."""


class Counting(TorchDispatchMode):
    """Counts into a Work while it is active."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.work = work
        self.paused = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        found = func(*args, **(kwargs or {}))
        if not self.paused:
            self._count(func, found, args, kwargs or {})
        return found

    def _count(self, func: Any, found: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name = str(func)
        given, made = list(tensors_in([*args, *kwargs.values()])), list(tensors_in([found]))
        devices = {each.device.type for each in (*given, *made) if each.dim() or each.device.type != "cpu"}
        if len(devices) > 1:
            self.work.between.append(name)
        if name.startswith(_LAUNCHES_NOTHING) or _is_view(func):
            return
        self.work.launches[name] += 1
        moved = made if name.startswith(_SPARSE) else [*given, *made]
        if name.startswith("aten.index_copy"):
            moved = given[2:]
        factor = 2 if name.startswith(_SPARSE) else 1
        self.work.bytes += factor * sum(each.numel() * each.element_size() for each in moved)
        if name.startswith("aten.linear"):
            self.work.operations += 2 * found.numel() * given[0].shape[-1]
        elif (count := flop_registry.get(func.overloadpacket)) is not None:
            self.work.operations += count(*args, **kwargs, out_val=found)


class CountedReductions:
    """Stands in for the kernels of digests: each reads the rows once, then torch joins the chunks."""

    slab = 2**25

    def __init__(self, work: Work) -> None:
        self._work = work

    def rows(self, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def highest(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self._read(rows, joins=4)
        return rows.new_empty(len(rows), 1, dtype=torch.int64), rows.new_empty(len(rows), 1).float()

    def mass(self, rows: torch.Tensor, top: torch.Tensor, factors: torch.Tensor | None) -> torch.Tensor:
        self._read(rows, joins=1)
        return rows.new_empty(len(rows), 1, dtype=torch.float64)

    def bounds(
        self, rows: torch.Tensor, asks: torch.Tensor, factors: torch.Tensor, noise_bounds: torch.Tensor
    ) -> torch.Tensor:
        self._read(rows, joins=0)
        self._work.bytes += 4 * rows.numel()
        return rows.new_empty(rows.shape, dtype=torch.float32)

    def leads(self, asks: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(ids)

    def reaching(self, rows: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
        self._read(rows, joins=1)
        return rows.new_empty(len(rows), 1, dtype=torch.int64)

    def before(
        self,
        rows: torch.Tensor,
        ids: torch.Tensor,
        logits: torch.Tensor,
        top: torch.Tensor,
        factors: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._read(rows, joins=2)
        return torch.empty_like(ids), logits.double()

    def _read(self, rows: torch.Tensor, joins: int) -> None:
        self._work.launches["digest kernel"] += 1 + joins
        self._work.bytes += rows.numel() * rows.element_size()


def _fused_norm(own: Any, to_the_bit: bool) -> norm.FusedNorm | None:
    """What `fuse_norms` does with a family's norm, whose output is not there to be compared."""
    if "Gemma" in type(own).__name__:
        return None
    return norm.FusedNorm(own.weight, own.variance_epsilon)


class FakeModel:
    """A model of any size on the fake device, in static steps.

    Args:
        config: config of the model.
        patch: replaces what copies between host and device, for the test's duration.
        dtype: dtype of the model.
        tokens: tokens for whose keys and values the model has room.
        gpu: how passes run.
    """

    def __init__(
        self,
        config: transformers.PreTrainedConfig,
        patch: pytest.MonkeyPatch,
        dtype: torch.dtype = torch.bfloat16,
        tokens: int = 4096,
        gpu: GpuOptions | None = None,
    ) -> None:
        self.work = Work()
        self._counting = Counting(self.work)
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._patch(patch)
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
            with self.mode:
                model.to_empty(device="cuda")
        finally:
            torch.set_default_dtype(before)
        with self.mode:
            self.lm = PackedLM(model.requires_grad_(False), kv_mb=1)
            slot_bytes = self.lm.pool.layout.slot_bytes
            self.lm = PackedLM(model, kv_mb=tokens * slot_bytes // 2**20 + 1, gpu=gpu)
            if self.lm.profile.can_pack(model, ranks=1):
                self.lm.pack()
        self.lm.digester = RowDigester(
            self.lm.vocabulary_size,
            torch.device("cpu"),
            reductions=CountedReductions(self.work),
        )
        with self.mode:
            self.steps = backend_choice.use_graphs(self.lm, "gathered")
        self.steps._attend = self._attend

    @property
    def buffers(self) -> int:
        """Size of what steps hold between passes, in bytes: inputs, logits and digests."""
        held = (self.steps._logits, self.steps._digests, self.steps._inputs.asks.device)
        return sum(each.nbytes for each in held if each is not None)

    @contextmanager
    def counting(self) -> Iterator[Work]:
        """Counts what the device is asked to do inside the context."""
        self.work.__init__()  # type: ignore[misc]
        with self.mode, self._counting:
            yield self.work

    def _patch(self, patch: pytest.MonkeyPatch) -> None:
        # torch's own indexing asks for a device guard, which a build without CUDA does not have.
        patch.setattr(FakeTensor, "__getitem__", _indexed, raising=False)
        patch.setattr(FakeTensor, "__setitem__", _assign, raising=False)
        patch.setattr(FakeTensor, "copy_", _copy, raising=False)
        patch.setattr(FakeTensor, "__invert__", lambda mask: torch.bitwise_not(mask), raising=False)
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        patch.setattr(runner, "digester_for", lambda *_: None)
        patch.setattr(norm, "_fused", _fused_norm)
        patch.setattr(graph_runner, "GraphInputs", HalfFakeInputs)
        patch.setattr(transfer, "pinned", lambda size, device: torch.empty(size, dtype=torch.uint8))
        patch.setattr(transfer, "device_side", lambda host, device: self._fake(host.numel()))
        patch.setattr(transfer, "upload", lambda host, device, size: self.work.up.append(size))
        patch.setattr(transfer, "download", self._download)

    def _fake(self, size: int) -> torch.Tensor:
        with self.mode:
            return torch.empty(size, dtype=torch.uint8, device="cuda")

    def _download(self, rows: torch.Tensor) -> "Downloaded":
        self.work.down.append(rows.numel() * rows.element_size())
        return Downloaded(tuple(rows.shape))

    def _attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        metadata: AttentionMetadata,
        params: AttentionParams,
    ) -> torch.Tensor:
        """Stands in for the kernel, whose reading of the cache the tests add by themselves."""
        self.work.launches["attention"] += KERNELS
        self.work.bytes += 2 * query.numel() * query.element_size()
        self._counting.paused = True
        try:
            return query.new_empty(*query.shape[:2], values.shape[2])
        finally:
            self._counting.paused = False


@dataclass(frozen=True)
class Downloaded:
    """The outcome on the host: digests that hold nothing."""

    shape: tuple[int, ...]

    def numpy(self) -> NDArray[np.int32]:
        return np.zeros(self.shape, np.int32)


class HalfFakeInputs(GraphInputs):
    """Inputs of steps whose side on the host is real."""

    def __init__(self, *given: Any) -> None:
        with unset_fake_temporarily():
            super().__init__(*given)

    def add_asks(self, words: int) -> None:
        with unset_fake_temporarily():
            super().add_asks(words)


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    for each in values:
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, list | tuple):
            yield from tensors_in(each)


def _indexed(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    """``tensor[index]`` by operations that need no device guard."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if any(part is Ellipsis for part in parts):
        at = next(place for place, part in enumerate(parts) if part is Ellipsis)
        consumed = sum(part is not None for part in parts) - 1
        parts[at : at + 1] = [slice(None)] * (tensor.dim() - consumed)
    dim = 0
    gathered: list[torch.Tensor | None] = []
    for part in parts:
        if part is None:
            tensor = tensor.unsqueeze(dim)
        elif isinstance(part, slice):
            tensor = torch.ops.aten.slice.Tensor(tensor, dim, part.start, part.stop, part.step or 1)
        elif isinstance(part, torch.Tensor):
            gathered += [None] * (dim - len(gathered)) + [part]
        else:
            tensor = tensor.select(dim, part)
            continue
        dim += 1
    return torch.ops.aten.index.Tensor(tensor, gathered) if gathered else tensor


def _assign(tensor: torch.Tensor, index: Any, value: torch.Tensor) -> None:
    """``tensor[index] = value`` for indices that make a view."""
    _copy(_indexed(tensor, index), value)


def _copy(tensor: torch.Tensor, value: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """``tensor.copy_(value)``, for which autograd would ask for a device guard."""
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.aten.copy_.default(tensor, value, non_blocking)


def _is_view(func: Any) -> bool:
    returned = func._schema.returns
    aliases = [each.alias_info for each in returned]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)
