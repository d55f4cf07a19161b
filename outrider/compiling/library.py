"""A small library of our own C++: compiled once for each processor, kept in the cache folder."""

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider.compiling.building import BuildLimits, build_in
from outrider.compiling.store import CompileFailed, PackageStore
from outrider.compiling.toolchain import find_compiler, processor_flags

KERNELS = "kernels"
"""Folder of these libraries' packages below the cache folder."""

_INCLUDED = re.compile(r'^#include "(.+)"', re.MULTILINE)
_LIMITS = BuildLimits(seconds=120.0, megabytes=256)


@dataclass(frozen=True, slots=True)
class LibrarySource:
    """What a library is made of: the source that is compiled, flags of g++, the file's name."""

    source: Path
    flags: tuple[str, ...]
    name: str

    def find(self, cache_dir: Path, is_stopped: Callable[[], bool], compiles: bool) -> Path | None:
        """The library's file; None where the cache lacks it and it is not to be compiled.

        Raises CompileFailed.
        """
        compiler = find_compiler()
        if compiler is None:
            raise CompileFailed("there is no C++ compiler (g++) on the PATH; install one")
        parts = [*texts_of(self.source), compiler, " ".join(self.flags), processor_flags()]
        key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
        store = PackageStore(cache_dir / KERNELS)
        found = store.find(key)
        if found is None and not compiles:
            return None
        if found is None:

            def command(folder: Path) -> Sequence[str]:
                return compile_command(self, compiler, folder)

            found = build_in(store, key, (self.name,), command, is_stopped, _LIMITS)
        return found / self.name


def compile_command(library: LibrarySource, compiler: str, folder: Path) -> list[str]:
    """The command that compiles a library into ``folder`` for this processor."""
    return [compiler, *library.flags, str(library.source), "-o", str(folder / library.name)]


def texts_of(source: Path) -> list[str]:
    """The text of a source, then of each header beside it that it includes, directly or by another."""
    texts = {source: source.read_text()}
    left = [source]
    for file in left:
        for name in _INCLUDED.findall(texts[file]):
            header = file.with_name(name)
            if header not in texts:
                texts[header] = header.read_text()
                left.append(header)
    return list(texts.values())
