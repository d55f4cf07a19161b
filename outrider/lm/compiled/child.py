"""The process that compiles one package: `python -m outrider.lm.compiled.child FOLDER`.

It reads the order from the folder and writes there the operators' library, the package and the layout of its
weights. It ends when its parent ends, which it notices by its standard input.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import torch

_NICENESS = 15
"""How far compiling gives way to serving on the same cores."""

ORDER = "order.json"
"""The order in a folder to compile in."""

OPERATORS = "operators.so"
"""The operators' library in a compiled folder."""

PACKAGE = "pass.so"
"""The model's library in a compiled folder."""

_ARCHIVE = "pass.pt2"

PANELS = "panels.json"
"""How the package's weights are laid out, in a compiled folder."""


def compile_operators(compiler: str, folder: Path) -> Path:
    """Compiles the operators' library for this processor. Raises CalledProcessError with g++'s message."""
    library = folder / OPERATORS
    installed = Path(torch.__file__).parent
    subprocess.run(
        [
            compiler,
            "-std=c++17",
            "-O3",
            "-march=native",
            "-fPIC",
            "-shared",
            "-Wno-psabi",
            f"-I{installed / 'include'}",
            str(Path(__file__).with_name("kernels.cpp")),
            "-o",
            str(library),
            f"-L{installed / 'lib'}",
            "-ltorch_cpu",
        ],
        check=True,
        capture_output=True,
        text=True,
    )
    return library


def compile_folder(folder: Path) -> None:
    """Carries out the order in ``folder``."""
    # Imported here, so that the names above cost a serving process nothing.
    import ctypes

    from torch._inductor import aoti_compile_and_package
    from transformers import AutoConfig

    from outrider.lm.compiled.graph import INDUCTOR, WeightFormat, export_pass
    from outrider.lm.compiled.order import CompileOrder
    from outrider.lm.load.part import ModelPart
    from outrider.skip_set import read_skips

    order = CompileOrder.from_json((folder / ORDER).read_text())
    torch.set_num_threads(1)  # Inductor's own loops: only our operators have helpers
    library = compile_operators(order.compiler, folder)
    width = ctypes.CDLL(str(library)).outrider_panel_width()
    read = json.loads(order.config)
    config = AutoConfig.for_model(read.pop("model_type"), **read)
    weights = WeightFormat(width, order.weight_dtype)
    part = ModelPart(read_skips(order.skip), order.first)
    program = export_pass(config, order.features, weights, order.inlined, order.added_ids, part)
    aoti_compile_and_package(program, package_path=str(folder / _ARCHIVE), inductor_configs=INDUCTOR)
    unpack_library(folder / _ARCHIVE, folder / PACKAGE)
    (folder / PANELS).write_text(json.dumps({"width": width}))


def unpack_library(archive: Path, library: Path) -> None:
    """Copies the model's library out of an Inductor package.

    Raises ValueError for a package whose model calls operators that are not compiled with it: these would
    need torch's own loader.
    """
    with zipfile.ZipFile(archive) as packed:
        names = packed.namelist()
        for name in names:
            described = json.loads(packed.read(name) or b"{}") if name.endswith(".json") else {}
            if isinstance(described, dict) and (nodes := described.get("nodes")):
                called = nodes[0]["node"]["target"]
                raise ValueError(f"its passes call {called}, which is not compiled with them")
        (found,) = [name for name in names if name.endswith(".so")]
        library.write_bytes(packed.read(found))


def _end_with_parent() -> None:
    os.read(0, 1)  # not sys.stdin: its lock would be held while the interpreter ends
    os.killpg(0, signal.SIGKILL)


def main() -> int:
    """Compiles in the folder named by the only argument; the last line on stderr says why it failed."""
    os.nice(_NICENESS)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        compile_folder(Path(sys.argv[1]))
    except subprocess.CalledProcessError as error:
        said = next((line for line in error.stderr.splitlines() if "error" in line), "no message")
        print(f"{error.cmd[0]} fails: {said}", file=sys.stderr)
        return 1
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        print(f"{type(error).__name__}: {lines[0]}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
