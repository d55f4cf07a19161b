"""Counts the memory of a fake GPU that is alive, and its peak."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.gpu.fake_cuda import tensors_in


class LiveMemory(TorchDispatchMode):
    """While active, counts what operations allocate on the fake device until nobody holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        """Bytes alive now, and the most at once."""
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        given = {_storage(each) for each in tensors_in([*args, *(kwargs or {}).values()])}
        found = func(*args, **(kwargs or {}))
        for each in tensors_in([found]):
            if each.device.type == "cuda" and _storage(each) not in given | self._known.keys():
                self._note(each.untyped_storage())
        return found

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)

        def gone(_: object) -> None:
            self.now -= size
            del self._known[key]

        self._known[key] = weakref.ref(storage, gone)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
