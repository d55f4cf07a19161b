"""A compiled pass as a library: loaded and called by Inductor's C interface, without the interpreter lock.

torch's own loader of packages holds the interpreter lock for the whole pass, so that no other thread of the
process runs: committed tokens would wait for the next pass to end. A call by ctypes gives the lock back.
`torch/csrc/inductor/aoti_runtime/interface.h` declares the functions.
"""

import ctypes
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from outrider.compiling.store import CompileFailed

_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype = ctypes.py_object
_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


class _Entry(ctypes.Structure):
    """An AOTInductorConstantMapEntry."""

    _fields_ = (("name", ctypes.c_char_p), ("handle", ctypes.c_void_p))


class ModelContainer:
    """One compiled model in a library of Inductor's. Raises CompileFailed where a call fails.

    Args:
        library: the model.
        operators: library of the operators that the model calls by name.
    """

    def __init__(self, library: Path, operators: Path) -> None:
        # The model's library finds the operators by name, so they have to be visible to all.
        self.operators = ctypes.CDLL(str(operators), mode=ctypes.RTLD_GLOBAL)
        """The library of the operators."""
        self._library = ctypes.CDLL(str(library))
        self._constants: list[int] = []
        """Handles of the tensors that the model reads in place."""
        self._handle = ctypes.c_void_p()
        self._call("ContainerCreateWithDevice", ctypes.byref(self._handle), _size(1), b"cpu", None)
        end = self._library.AOTInductorModelContainerDelete
        weakref.finalize(self, _release, end, self._handle, self._constants).atexit = False
        count = ctypes.c_size_t()
        self._call("ContainerGetNumOutputs", self._handle, ctypes.byref(count))
        self._outputs = count.value
        self._run = self._library.AOTInductorModelContainerRun

    def constants(self) -> dict[str, str]:
        """The model's own name of each constant, and the name that the exported program has for it."""
        count, inside, outside = ctypes.c_size_t(), ctypes.c_char_p(), ctypes.c_char_p()
        self._call("ContainerGetNumConstants", self._handle, ctypes.byref(count))
        found: dict[str, str] = {}
        for index in range(count.value):
            at = _size(index)
            self._call("ContainerGetConstantName", self._handle, at, ctypes.byref(inside))
            self._call("ContainerGetConstantOriginalFQN", self._handle, at, ctypes.byref(outside))
            found[(inside.value or b"").decode()] = (outside.value or b"").decode()
        return found

    def use(self, constants: Mapping[str, torch.Tensor]) -> None:
        """Has the model read these tensors in place, by the model's own names; for once."""
        handles = [new_handle(tensor) for tensor in constants.values()]
        self._constants += handles
        entries = (_Entry * len(constants))()
        for entry, name, handle in zip(entries, constants, handles, strict=True):
            entry.name, entry.handle = name.encode(), handle
        self._call(
            "ContainerUpdateUserManagedConstantBufferPairs",
            self._handle,
            entries,
            _size(len(constants)),
            ctypes.c_bool(False),
            ctypes.c_bool(True),
        )

    def run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The outputs for these inputs. Raises RuntimeError where the model fails."""
        # The model takes the handles over, whether it fails or not.
        given = (ctypes.c_void_p * len(inputs))(*map(new_handle, inputs))
        made = (ctypes.c_void_p * self._outputs)()
        failed = self._run(self._handle, given, _size(len(inputs)), made, _size(self._outputs), None, None)
        if failed:
            raise RuntimeError(f"a compiled pass failed: {self._last_error()}")
        return [tensor_of(handle) for handle in made]

    def _call(self, name: str, *arguments: Any) -> None:
        if getattr(self._library, f"AOTInductorModel{name}")(*arguments):
            raise CompileFailed(f"{name} of the compiled model failed: {self._last_error()}")

    def _last_error(self) -> str:
        said = ctypes.c_char_p()
        self._library.AOTInductorGetLastError(ctypes.byref(said))
        lines = (said.value or b"no message").decode(errors="replace").splitlines()
        return lines[0] if lines else "no message"


def _release(end: Callable[[ctypes.c_void_p], int], handle: ctypes.c_void_p, constants: list[int]) -> None:
    """Deletes a container and its handles of the constants."""
    end(handle)
    for constant in constants:
        delete(constant)


def _size(number: int) -> ctypes.c_size_t:
    return ctypes.c_size_t(number)


def new_handle(tensor: torch.Tensor) -> int:
    """A new handle of a tensor, an AtenTensorHandle."""
    capsule = torch._C._aoti.unsafe_alloc_void_ptr_from_tensor(tensor)
    pointer: int = _capsule_pointer(capsule, None)
    return pointer


def tensor_of(handle: int | None) -> torch.Tensor:
    """The tensor of a handle, which is deleted."""
    tensor = _taken(handle)
    if _stays():
        delete(handle)
    return tensor


def delete(handle: int | None) -> None:
    """Deletes a handle, and its hold on the tensor's memory."""
    _deleting()(handle)


def _taken(handle: int | None) -> torch.Tensor:
    return torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr(_capsule(handle, None, None))


@cache
def _deleting() -> Callable[[int | None], int]:
    """torch's own function that deletes a handle."""
    # A short call, for which the interpreter lock is not worth giving up.
    library = ctypes.PyDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    library.aoti_torch_delete_tensor_object.argtypes = (ctypes.c_void_p,)
    return library.aoti_torch_delete_tensor_object


@cache
def _stays() -> bool:
    """Whether torch leaves the handle that it takes a tensor from, as torch 2.13 does: memory would leak."""
    storage = torch.zeros(1).untyped_storage()
    before = holders(storage)
    _taken(new_handle(torch.empty(0).set_(storage)))
    return holders(storage) > before


def holders(storage: torch.UntypedStorage) -> int:
    """How many tensors and other owners hold a storage."""
    return torch._C._storage_Use_Count(storage._cdata)
