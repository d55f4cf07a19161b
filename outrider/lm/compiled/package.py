"""A compiled package in use: loaded with a model's weights, called once a pass.

Nothing here traces or compiles. The weights are the serving process' own tensors, which the package reads in
place, and the panels of linear layers, which all packages of a model could share.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from outrider.compiling.store import CompileFailed
from outrider.lm.autotune.threads import PassThreads
from outrider.lm.compiled.child import OPERATORS, PACKAGE, PANELS
from outrider.lm.compiled.container import ModelContainer
from outrider.lm.compiled.step_block import plane_words, step_block
from outrider.lm.device.layout import NO_ASKS, Asks
from outrider.lm.graphs.graph_runner import Computed
from outrider.lm.kv.pool import SlotPool
from outrider.lm.plan import PassPlan
from outrider.lm.step_profile import StepProfile


class PassPackage:
    """One loaded package with its weights.

    Args:
        folder: the package's folder.
        constants: tensors by name, at least those that the package names; see `panels.constants_of`.
    """

    def __init__(self, folder: Path, constants: Mapping[str, torch.Tensor]) -> None:
        self._container = ModelContainer(folder / PACKAGE, folder / OPERATORS)
        named = self._container.constants()
        if unknown := [name for name in named.values() if name not in constants]:
            raise CompileFailed(f"the package wants {unknown[0]!r}, which the model lacks")
        self._container.use({inside: constants[name] for inside, name in named.items()})
        # There is no such function where OpenMP's threads help.
        self._use_threads = getattr(self._container.operators, "outrider_use_threads", lambda _: None)

    def run(self, inputs: list[torch.Tensor], threads: int) -> list[torch.Tensor]:
        """Runs one pass, during which other threads run; see `graph.WholePass.forward`.

        ``threads`` is the most threads that compute, the caller's included; 0: as many as torch has. Without
        helpers (not on Linux) the number is torch's in any case.
        """
        self._use_threads(threads)
        try:
            return self._container.run(inputs)
        finally:
            self._use_threads(0)  # heads, which have libraries of their own, compute with torch's number


def panel_width(folder: Path) -> int:
    """Number of outputs of a panel in the package of this folder."""
    return int(json.loads((folder / PANELS).read_text())["width"])


class CompiledRunner:
    """Runs every pass of a model by one compiled package. Takes the place of a `GraphRunner`."""

    def __init__(self, package: PassPackage, pool: SlotPool) -> None:
        self.profile: StepProfile | None = None
        """How long passes take, until `take_profile`."""
        self.threads = PassThreads()
        """Threads that compute a pass."""
        self._package = package
        self._pool = pool
        self._planes: list[int] = []
        self._slots = -1

    def take_profile(self) -> StepProfile | None:
        """Hands over, once, how long the passes take; None if that was not measured or is handed over."""
        profile, self.profile = self.profile, None
        return profile

    def forward(
        self, plan: PassPlan, ids: Sequence[int], wanted: Sequence[int], asks: Asks = NO_ASKS
    ) -> Computed:
        """Runs one pass; logits and hidden states belong to the caller."""
        if self._slots != self._pool.slots:
            # The pool has grown, so the slots lie at other addresses now.
            self._planes = plane_words(self._pool.planes()[: 2 * self._pool.layout.layers])
            self._slots = self._pool.slots
        # NumPy makes what torch could: a pass leaves nothing of torch in the processor's caches, so that an
        # operation of torch takes ten microseconds here.
        found = self._package.run(
            [
                torch.from_numpy(np.array([ids], np.int64)),
                torch.from_numpy(np.array([plan.positions()], np.int64)),
                # A graph has no empty results: a pass that wants no row computes the first one's logits.
                torch.from_numpy(np.array(wanted or [0], np.int64)),
                step_block(plan.rows, self._planes),
            ],
            self.threads.of(len(ids)),
        )
        logits = found[0] if wanted else found[0][:0]
        return Computed(logits, found[1] if len(found) > 1 else None, None)
