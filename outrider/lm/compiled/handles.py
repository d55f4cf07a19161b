"""Handles by which compiled passes take and give tensors: each is to be deleted once.

A handle owns a tensor of its own, which shares its memory with the tensor that it was made of.
"""

import ctypes
from functools import cache
from pathlib import Path

import torch

_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype = ctypes.py_object
_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
# Short calls, for which the interpreter lock is not worth giving up.
_torch = ctypes.PyDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
_torch.aoti_torch_delete_tensor_object.argtypes = (ctypes.c_void_p,)


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
    _torch.aoti_torch_delete_tensor_object(handle)


def _taken(handle: int | None) -> torch.Tensor:
    return torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr(_capsule(handle, None, None))


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
