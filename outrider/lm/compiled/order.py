"""The order that a child compiles, and the key under which the cache keeps its package.

The key holds everything that the package depends on: the model's configuration, its smallest tensors, the
layers whose hidden states are kept, versions, the sources that make the graph, the compiler's path and the
processor.
"""

import hashlib
import json
import platform
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch
import transformers

from outrider.compiling.toolchain import processor_flags
from outrider.lm.weight_only.packing import WeightDtype

_SOURCES = (
    "compiled/graph.py",
    "compiled/helpers.hpp",
    "compiled/kernels.cpp",
    "compiled/operators.py",
    "compiled/panel_product.hpp",
    "compiled/panels.py",
    "compiled/slot_attention.hpp",
    "compiled/step_block.py",
    "compiled/child.py",
    "compiled/container.py",
    "attention/interface.py",
    "features.py",
    "linear.py",
    "load/added_embeddings.py",
    "load/part.py",
    "load/sublayers.py",
    "runner.py",
    "weight_only/packing.py",
    "../skip_set.py",
)
"""Files that decide what a package computes and how it is called, by their paths from `outrider.lm`."""


@dataclass(frozen=True, slots=True)
class CompileOrder:
    """An order to compile one model's passes: everything that the child needs to know."""

    config: str
    """The model's configuration as JSON."""
    features: tuple[int, ...]
    """Layers whose hidden states the pass returns; see `OutcomeWants.features`."""
    compiler: str
    """Path of the C++ compiler."""
    inlined: dict[str, list[float]]
    """Values of the constants that become part of the code; see `panels.inlined`."""
    added_ids: int = 0
    """Ids behind the vocabulary that have embeddings; see `PackedLM.add_embeddings`."""
    weight_dtype: WeightDtype = "auto"
    """Number format of the weights of linear layers."""
    skip: tuple[str, ...] = ()
    """What is skipped of the model that `config` describes; see `ModelPart.skip`."""
    first: int = 0
    """Number of leading layers that are kept of it; see `ModelPart.first`."""

    @property
    def key(self) -> str:
        """Name of the package in the cache: a digest of the order, of versions, sources and the processor."""
        parts = [
            json.dumps(asdict(self), sort_keys=True),
            torch.__version__,
            transformers.__version__,
            platform.machine(),
            processor_flags(),
            _sources_digest(),
        ]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]

    def to_json(self) -> str:
        """The order as the child reads it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "CompileOrder":
        """The order that `to_json` wrote."""
        read = json.loads(text)
        return cls(**read | {"features": tuple(read["features"]), "skip": tuple(read["skip"])})


@cache
def _sources_digest() -> str:
    folder = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for name in _SOURCES:
        digest.update((folder / name).read_bytes())
    return digest.hexdigest()
