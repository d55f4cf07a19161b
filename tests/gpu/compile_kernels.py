"""Compiles the kernels of attention and digests for one GPU architecture; prints what each variant takes.

Run as `python -m tests.gpu.compile_kernels 90`: one JSON line per variant. Needs Triton, whose wheel brings
ptxas, and no GPU.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource, compile

from outrider.lm.attention.kernels import int8_rows, tree_attention
from outrider.lm.attention.metadata import WORDS
from outrider.lm.device import digest_kernels
from outrider.lm.kv.blocks import BLOCK
from outrider.lm.kv.int8_plane import LEAST_SCALE, MOST_CODE

DTYPES = {"bf16": 2, "fp16": 2, "fp32": 4}
WIDTHS = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256))
"""Widths of keys and of values."""
GROUPS = (1, 4, 8)
SIDES = (16, 64)
"""Queries in a small and in a large tile."""
CODES = {"MOST": MOST_CODE, "LEAST": LEAST_SCALE, "num_warps": 1}
"""Constants of the kernel that writes rows in int8."""
_FLOATS = ("scale", "softcap")
_INDICES = ("items", "tiles", "spans", "first", "upto", "masks", "tables", "row_tile")
DIGESTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("_highest", {"CHUNK": 2048}),
    ("_mass", {"CHUNK": 2048, "SCALED": True}),
    ("_mass", {"CHUNK": 2048, "SCALED": False}),
    ("_leads", {"PADDED": 64}),
    ("_bounds", {"BLOCKS": 128}),
    ("_before", {"CHUNK": 2048, "PLACES": 8, "WEIGHED": True}),
    ("_before", {"CHUNK": 2048, "PLACES": 1, "WEIGHED": False}),
)
"""The kernels of digests, and constants that they are compiled with."""
_DIGESTED = {
    "*i64": ("lows", "asks", "ids"),
    "*i32": ("counts",),
    "*fp32": ("tops", "factors", "noise_bounds", "logits"),
    "*fp64": ("sums", "masses"),
}
"""Kinds of the arrays of the kernels of digests."""


def variants() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Kernel, dtype and constants of every variant; caps and sinks take turns over them."""
    for at, ((dtype, size), (width, value_width), groups, side) in enumerate(
        product(DTYPES.items(), WIDTHS, GROUPS, SIDES)
    ):
        padded, value_padded = (triton.next_power_of_2(each) for each in (width, value_width))
        shape = {
            "GROUPS": groups,
            "VALUE_WIDTH": value_width,
            "VALUE_PADDED": value_padded,
            "SIDE": side,
            "HAS_SINKS": at % 3 == 0,
        }
        item = {
            "WIDTH": width,
            "PADDED": padded,
            **tree_attention.loop_of(padded, size, side),
            "MASK_WORDS": WORDS,
            "PAGE": BLOCK,
            "HAS_CAP": at % 2 == 0,
            "IS_INT8": False,
            "WIDEN": False,
        }
        yield "_attend_item", dtype, shape | item
        yield "_attend_item", dtype, shape | item | {"IS_INT8": True}
        if groups == 4:
            yield "_join_items", dtype, shape
        if (groups, side) == (4, 64):
            yield "_write_row", dtype, {"WIDTH": width, "PADDED": padded, **CODES}


def compiled(kernel: str, dtype: str, constants: dict[str, Any], architecture: int) -> dict[str, Any]:
    """What one variant takes: shared memory, registers, spilled bytes, and the kinds of its products."""
    function = getattr(int8_rows if kernel == "_write_row" else tree_attention, kernel)
    options = {name: constants[name] for name in ("num_stages", "num_warps") if name in constants}
    constants = {name: value for name, value in constants.items() if name not in options}
    names = [parameter.name for parameter in function.params]
    kinds = dict.fromkeys(("query", "keys", "values", "output", "sinks"), "*" + dtype)
    is_int8 = constants.get("IS_INT8", kernel == "_write_row")
    if is_int8:
        kinds |= {"keys": "*i8", "values": "*i8", "codes": "*i8", "rows": "*" + dtype, "slots": "*i64"}
    kinds |= dict.fromkeys(("key_scales", "value_scales"), "*fp32" if is_int8 else "*" + dtype)
    kinds |= dict.fromkeys(("parts", "norms", "scales"), "*fp32") | dict.fromkeys(_FLOATS, "fp32")
    kinds |= dict.fromkeys(_INDICES, "*i32") | dict.fromkeys(constants, "constexpr")
    signature = {name: kinds.get(name, "i32") for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    # As in service: tensors lie at multiples of 16 bytes, and widths and strides are multiples of 16.
    aligned = {
        (at,): [["tt.divisibility", 16]]
        for at, name in enumerate(names)
        if signature[name][0] == "*" or (signature[name] == "i32" and name != "key_heads")
    }
    source = ASTSource(function, signature, values, aligned)
    found = compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    ptx = found.asm["ptx"]
    return {
        "kernel": kernel,
        "dtype": dtype,
        "width": constants.get("WIDTH"),
        "int8": is_int8,
        "groups": constants.get("GROUPS"),
        "side": constants.get("SIDE"),
        "shared": found.metadata.shared,
        **resources(ptx, architecture),
        "wgmma": "wgmma" in ptx or "tcgen05.mma" in ptx,
        "mma": "mma.sync" in ptx,
        "tf32": "tf32" in ptx,
    }


def digest_compiled(kernel: str, dtype: str, constants: dict[str, Any], architecture: int) -> dict[str, Any]:
    """What one variant of a kernel of digests takes; see `compiled`."""
    function = getattr(digest_kernels, kernel)
    names = [parameter.name for parameter in function.params]
    kinds = {name: kind for kind, arrays in _DIGESTED.items() for name in arrays}
    if kernel == "_before" and not constants["WEIGHED"]:
        kinds |= dict.fromkeys(("logits", "tops", "factors"), "*" + dtype)
        kinds["masses"] = "*i32"
    kinds |= {"rows": "*" + dtype, "found": "*i64" if kernel == "_leads" else "*fp32"}
    kinds |= dict.fromkeys(constants, "constexpr")
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(function, {name: kinds.get(name, "i32") for name in names}, values)
    found = compile(source, target=GPUTarget("cuda", architecture, 32))
    ptx = found.asm["ptx"]
    return {
        "kernel": kernel,
        "dtype": dtype,
        "width": None,
        "shared": found.metadata.shared,
        **resources(ptx, architecture),
        "tf32": "tf32" in ptx,
    }


def resources(ptx: str, architecture: int) -> dict[str, int]:
    """Registers of a thread and bytes that it spills, as ptxas counts them."""
    ptxas = get_ptxas(architecture).path
    target = re.search(r"\.target (\S+?)(?:,|\s)", ptx)
    assert target is not None
    with tempfile.TemporaryDirectory() as there:
        path = Path(there, "kernel.ptx")
        path.write_text(ptx)
        command = [
            ptxas,
            "-v",
            f"--gpu-name={target[1]}",
            str(path),
            "-o",
            str(path.with_suffix(".cubin")),
        ]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", told)))
    return {"registers": max(map(int, re.findall(r"Used (\d+) registers", told))), "spilled": spilled}


def main() -> None:
    """Compiles all variants for the architecture named; `--few` a few of them."""
    architecture, few = int(sys.argv[1]), "--few" in sys.argv
    for kernel, dtype, constants in list(variants())[:: 36 if few else 1]:
        print(json.dumps(compiled(kernel, dtype, constants, architecture)), flush=True)
    for (kernel, constants), dtype in product(DIGESTS, ("bf16",) if few else DTYPES):
        print(json.dumps(digest_compiled(kernel, dtype, constants, architecture)), flush=True)


if __name__ == "__main__":
    main()
