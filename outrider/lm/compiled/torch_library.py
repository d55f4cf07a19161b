"""Libraries of this folder's C++ that link with torch."""

from pathlib import Path

import torch

from outrider.compiling.library import LibrarySource

_HERE = Path(__file__).parent
_TORCH = Path(torch.__file__).parent


def torch_library(name: str) -> LibrarySource:
    """The library of the source of this name in this folder."""
    return LibrarySource(
        source=_HERE / f"{name}.cpp",
        flags=(
            *("-std=c++17", "-O3", "-march=native", "-fPIC", "-shared", "-Wno-psabi"),
            f"-DOUTRIDER_TORCH={torch.__version__}",  # another torch has other headers: compile again
            *(f"-I{_TORCH / 'include'}", f"-L{_TORCH / 'lib'}"),
            *("-Wl,--no-as-needed", "-ltorch_cpu"),  # named before the source that calls it
        ),
        name=f"{name}.so",
    )
