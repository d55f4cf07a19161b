"""Quantised checkpoints: the method that a configuration names, and the packages that read its weights.

Imports no torch: `outrider up` asks before it downloads weights that nothing here could read.
"""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from speculative.errors import InvalidRequest

PACKAGES: Mapping[str, tuple[str, ...]] = {
    "awq": ("gptqmodel", "accelerate"),
    "bitsandbytes": ("bitsandbytes", "accelerate"),
    "compressed-tensors": ("compressed-tensors",),
    "fbgemm_fp8": ("fbgemm-gpu", "accelerate"),
    "fp8": ("accelerate",),
    "gptq": ("gptqmodel", "optimum"),
    "hqq": ("hqq", "accelerate"),
    "mxfp4": ("accelerate", "kernels"),
    "quanto": ("optimum-quanto", "accelerate"),
    "torchao": ("torchao",),
}
"""Packages, by their name for pip, that transformers needs to read weights of a method."""
_MODULES = {
    "fbgemm-gpu": "fbgemm_gpu",
    "optimum-quanto": "optimum",
    "compressed-tensors": "compressed_tensors",
}
UNNAMED = "a method that it does not name"


def method_of(config: Mapping[str, Any]) -> str:
    """Name of the method by which weights are quantised, from `config.json`; empty for plain weights."""
    for one in (config, config.get("text_config")):
        found = one.get("quantization_config") if isinstance(one, Mapping) else None
        if found:
            method = found.get("quant_method") if isinstance(found, Mapping) else None
            return str(method or UNNAMED)
    return ""


def check_readable(source: str, method: str) -> None:
    """Raises InvalidRequest where packages are missing that read weights of this method, and names them.

    Args:
        source: the model, for the message.
        method: result of `method_of`; an unknown method passes, since transformers checks it at load.
    """
    missing = [
        package for package in PACKAGES.get(method, ()) if find_spec(_MODULES.get(package, package)) is None
    ]
    if missing:
        raise InvalidRequest(
            f"model {source!r} has weights quantised by {method}, and the packages that read them are not "
            f"installed here: pip install {' '.join(missing)}; or give a checkpoint of plain weights"
        )
