"""The compiled index of past outputs: built once for each processor, checked against the Python one, loaded.

`past_index.cpp` has the arithmetic. Calls keep the interpreter's lock: the longest takes some tens of
microseconds, apart from the one that takes over a whole index.
"""

import ctypes
import random
import weakref
from array import array
from collections.abc import Callable
from pathlib import Path

from outrider.compiling.library import LibrarySource
from outrider.compiling.store import CompileFailed
from retrieval_service.past.python_index import READ, PositionIndex, PythonIndex

_SOURCE = LibrarySource(
    source=Path(__file__).with_name("past_index.cpp"),
    flags=("-std=c++17", "-O2", "-march=native", "-fPIC", "-shared"),
    name="past_index.so",
)
_NO_MEMORY = -2
_INTEGER, _ADDRESS = ctypes.c_int64, ctypes.c_void_p


class IndexLibrary:
    """The functions of the compiled index."""

    def __init__(self, path: Path) -> None:
        self.path = path
        """The library's file."""
        loaded = ctypes.PyDLL(str(path))

        def function(name: str, *arguments: type) -> Callable[..., int]:
            found = getattr(loaded, f"past_{name}")
            found.argtypes, found.restype = (_ADDRESS, *arguments), _INTEGER
            return found  # type: ignore[no-any-return]

        self.new = loaded.past_new
        self.new.argtypes, self.new.restype = (), _ADDRESS
        self.delete = loaded.past_delete
        self.delete.argtypes, self.delete.restype = (_ADDRESS,), None
        self.open = function("open")
        self.extend = function("extend", _INTEGER, _ADDRESS, _INTEGER)
        self.finish = function("finish", _INTEGER)
        self.remove = function("remove", _INTEGER, _INTEGER)
        self.close = function("close", _INTEGER)
        self.read = function("read", _ADDRESS, _INTEGER, _INTEGER, _ADDRESS, _ADDRESS)
        self.load_sequence = function("load_sequence", _ADDRESS, _INTEGER, _ADDRESS, _INTEGER, _INTEGER)
        self.load_free_page = function("load_free_page", ctypes.c_uint32)
        self.load_block = function("load_block", _ADDRESS, _INTEGER)


class CompiledIndex:
    """A PositionIndex in C++, with its own copy of the ids."""

    def __init__(self, library: IndexLibrary) -> None:
        self._library = library
        self._index = library.new()
        if self._index is None:
            raise MemoryError("no room for an index of past outputs")
        self._extend = library.extend
        self._texts: dict[int, array[int]] = {}
        # Not as the process ends: a thread that goes on until then may still look up.
        weakref.finalize(self, library.delete, self._index).atexit = False

    @classmethod
    def of(cls, library: IndexLibrary, other: PythonIndex) -> "tuple[CompiledIndex, dict[int, int]]":
        """An index that finds what the other one finds, and its handles by the other's.

        Raises MemoryError.
        """
        made = cls(library)
        handles = {}
        for handle, sequence in other.sequences.items():
            ids, count = sequence.ids.buffer_info()
            pages, number = sequence.pages.buffer_info()
            loaded = library.load_sequence(made._index, ids, count, pages, number, sequence.indexed)
            handles[handle] = _checked(loaded)
            made._texts[loaded] = sequence.ids
        for page in other.free:
            _checked(library.load_free_page(made._index, page))
        for block in other.order.blocks:
            _checked(library.load_block(made._index, *block.buffer_info()))
        return made, handles

    def open(self, ids: "array[int]") -> int:
        """See PositionIndex. Raises MemoryError, as do the other methods."""
        handle = _checked(self._library.open(self._index))
        self._texts[handle] = ids
        return handle

    def extend(self, handle: int, new: "array[int]") -> None:
        """See PositionIndex."""
        address, count = new.buffer_info()
        if status := self._extend(self._index, handle, address, count):
            _checked(status)

    def finish(self, handle: int, ids: "array[int]") -> None:
        """See PositionIndex."""
        _checked(self._library.finish(self._index, handle))
        self._texts[handle] = ids

    def remove(self, handle: int, steps: int) -> int:
        """See PositionIndex."""
        return _checked(self._library.remove(self._index, handle, steps))

    def close(self, handle: int) -> None:
        """See PositionIndex."""
        _checked(self._library.close(self._index, handle))
        del self._texts[handle]

    def read(self, suffix: "array[int]") -> tuple[int, list[tuple["array[int]", int]]]:
        """See PositionIndex."""
        found = array("q", bytes(8 * (2 * READ + 1)))
        address, _ = found.buffer_info()
        ids, count = suffix.buffer_info()
        length = _checked(self._library.read(self._index, ids, count, READ, address + 8, address))
        pairs = found[1 : 1 + 2 * found[0]].tolist()
        texts = self._texts
        return length, [(texts[handle], at) for handle, at in zip(pairs[::2], pairs[1::2], strict=True)]


def find_library(cache_dir: Path, is_stopped: Callable[[], bool], compiles: bool) -> IndexLibrary | None:
    """The library, checked; None where the cache lacks it and it is not to be compiled.

    Raises CompileFailed, and OSError for a library that cannot be loaded.
    """
    path = _SOURCE.find(cache_dir, is_stopped, compiles)
    if path is None:
        return None
    library = IndexLibrary(path)
    check_library(library)
    return library


def check_library(library: IndexLibrary) -> None:
    """Raises CompileFailed unless a compiled index finds what the Python one finds, on some random text."""
    choose = random.Random(7)
    ours, theirs = PythonIndex(), CompiledIndex(library)
    texts = [array("I") for _ in range(4)]
    handles = [(ours.open(text), theirs.open(text)) for text in texts]
    for _ in range(300):
        number = choose.randrange(4)
        new = array("I", choose.choices(range(3), k=choose.randrange(1, 9)))
        texts[number].extend(new)
        ours.extend(handles[number][0], new)
        theirs.extend(handles[number][1], new)
        suffix = texts[choose.randrange(4)][: -choose.randrange(2, 40) : -1]
        if _found(ours, suffix) != _found(theirs, suffix):
            raise CompileFailed("the compiled index of past outputs finds other text than the Python one")


def _found(index: PositionIndex, suffix: "array[int]") -> tuple[int, list[tuple[int, int]]]:
    length, found = index.read(suffix)
    return length, [(id(text), at) for text, at in found]


def _checked(result: int) -> int:
    """A call's result. Raises MemoryError, and RuntimeError for what no caller should have asked for."""
    if result >= 0:
        return result
    if result == _NO_MEMORY:
        raise MemoryError("no room for an index of past outputs")
    raise RuntimeError(f"the index of past outputs refused a call (status {result})")
