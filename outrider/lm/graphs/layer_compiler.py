"""Layers compiled by Inductor, inside the graphs that a GPU runs: their elementwise operations fuse.

Each layer is compiled up to its attention and behind it; attention stays as it is. Layers share their code,
so there are a few kernels to build whatever the number of layers. Serving traces nothing: all of this happens
before graphs are captured.
"""

import logging
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from transformers import AttentionInterface

from outrider.lm.attention.interface import ATTENTION, PackedCache, packed_attention
from outrider.lm.graphs.backend_choice import step_ms, use_graphs
from outrider.lm.graphs.capture import Capture, CudaGraphs
from outrider.lm.load.part import layer_stack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import nn

    from outrider.lm.load.check import Trial
    from outrider.lm.runner import PackedLM

log = logging.getLogger(__name__)

_MOST_SLOWER = 1.05
"""Compiled layers stay unless steps take this many times as long: equal machines should choose alike."""
_SHOWN = 300
"""Characters of a compiler's error that the log shows."""


class CompiledLayers:
    """The compiled code of a model's layers, which takes the place of their own while it is active.

    Args:
        layers: the layers, all of one model.
        backend: the compiler, by torch's name.
    """

    def __init__(self, layers: "Iterable[nn.Module]", backend: str) -> None:
        from torch import _dynamo  # here, as it takes a third of a second to import

        # To trace attention, or a layer's place, would ask for as many compilations as there are layers.
        _dynamo.config.allow_unspec_int_on_nn_module = True
        self._attend = torch.compiler.disable(packed_attention)
        self._update = torch.compiler.disable(PackedCache.update)
        self._compiled = [
            (layer, torch.compile(layer.forward, dynamic=True, backend=backend)) for layer in layers
        ]

    @contextmanager
    def active(self) -> "Iterator[None]":
        """Runs the compiled code inside the context: graphs keep what they captured there.

        Outside, ragged passes run the layers as they are: calls of compiled code take longer than these
        passes gain.
        """
        update = PackedCache.update
        AttentionInterface.register(ATTENTION, self._attend)
        PackedCache.update = self._update  # type: ignore[method-assign]
        for layer, forward in self._compiled:
            layer.forward = forward
        try:
            yield
        finally:
            for layer, _ in self._compiled:
                del layer.forward  # the compiled one, which lay in front of the class's own
            PackedCache.update = update  # type: ignore[method-assign]
            AttentionInterface.register(ATTENTION, packed_attention)


def compile_layers(
    lm: "PackedLM",
    trial: "Trial | None",
    kernel: str,
    capture_of: "Callable[[], Capture]",
    backend: str = "inductor",
) -> None:
    """Compiles the layers of a model that runs static steps, if steps are right and not slower with them.

    Args:
        lm: the model; its steps are captured anew.
        trial: the check at load; None: the model was loaded without it.
        kernel: attention kernel of the steps.
        capture_of: makes a capture for the new steps.
        backend: the compiler, by torch's name.
    """
    layers = layer_stack(lm.model)
    if layers is None:
        log.info("layers are not compiled: %s has no list of layers", lm.model_type)
        return
    began, before, steps = time.monotonic(), step_ms(lm), lm.steps
    after, why = _compiled_ms(lm, trial, kernel, capture_of, CompiledLayers(layers, backend))
    if not why and sum(after.values()) < _MOST_SLOWER * sum(before.values()):
        took = {"eager_ms": before, "compiled_ms": after, "seconds": round(time.monotonic() - began, 1)}
        log.info("layers were compiled", extra={"fields": took})
        return
    log.warning("layers are not compiled: %s", why or f"steps take {after} ms with them and {before} without")
    lm.steps = steps


def _compiled_ms(
    lm: "PackedLM",
    trial: "Trial | None",
    kernel: str,
    capture_of: "Callable[[], Capture]",
    layers: CompiledLayers,
) -> tuple[dict[str, float], str]:
    """What steps take with these layers in ms, by size, and why they cannot serve; empty where they can."""
    try:
        capture = capture_of()
        steps = use_graphs(lm, kernel, capture)
        steps.around_run, steps.label = layers.active, "static-compiled"
        if trial is not None:
            trial.verify(lm)
        return step_ms(lm), capture.refusal if isinstance(capture, CudaGraphs) else ""
    except Exception as error:
        # Errors of compilers and drivers have no common class, and say what is wrong in their second line.
        origin = error.__cause__ or error
        return {}, f"{type(origin).__name__}: {' '.join(str(origin).split())[:_SHOWN]}"
