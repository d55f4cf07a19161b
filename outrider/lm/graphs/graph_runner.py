"""Steps of static shape: how decoding runs on a GPU, as one captured graph per size.

Rows are padded to a few sizes, and all inputs and results lie at fixed addresses. So a step is one copy up,
one replay and one copy of digests down, however many sessions share the step. Logits and hidden states stay
in buffers that all sizes share, until the next step. Digests are graphs of their own, as their number depends
on the wanted rows alone. Passes beyond the largest size and sessions with very many branching nodes run as
ragged passes (`outrider.lm.attention`).
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch

from outrider.lm.attention.interface import AttentionParams, PackedCache
from outrider.lm.attention.metadata import Attend, AttentionMetadata, WriteRows
from outrider.lm.attention.shapes import (
    BUCKETS,
    GraphShape,
    all_shapes,
    graph_shape,
    padded,
    smallest_holding,
)
from outrider.lm.device.digest import RowDigester
from outrider.lm.device.layout import ASK_WORDS, NO_ASKS, Asks, DigestLevel
from outrider.lm.features import FeatureTaps
from outrider.lm.graphs.capture import Capture, CudaGraphs, Run
from outrider.lm.graphs.inputs import GraphInputs
from outrider.lm.kv.blocks import BLOCK
from outrider.lm.kv.pool import SlotPool
from outrider.lm.plan import PassPlan
from speculative.errors import ModelRefused

log = logging.getLogger(__name__)

_PROGRESS_S = 5.0
"""Seconds between two reports of progress while sizes are captured."""

RunOnDevice = Callable[[PackedCache, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""The model's forward: cache, ids and positions ``[1, rows]``, wanted row indices, to logits."""


class Computed(NamedTuple):
    """What a pass has computed, on the device."""

    logits: torch.Tensor
    """Logits of the wanted rows, ``[n, V]``, in the model's dtype."""
    features: torch.Tensor | None
    """Hidden states of all rows, ``[layers, rows, width]``, or None."""
    digests: torch.Tensor | None
    """Digests of the wanted rows, int32 ``[n, words]``; None: none were made."""


def write_indexed(plane: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Writes a step's rows by torch's own operations. A `WriteRows`."""
    plane.index_copy_(1, slots, rows)


class PagedCache(PackedCache):
    """The KV cache of one static step: writes each row's keys and values to its slot, then attends."""

    def __init__(
        self,
        model_type: str,
        pool: SlotPool,
        slots: torch.Tensor,
        metadata: Mapping[int | None, AttentionMetadata],
        attend: Attend,
        write: WriteRows = write_indexed,
    ) -> None:
        super().__init__(model_type)
        self._planes = pool.planes()
        self._slots = slots
        self._metadata = metadata
        self._attend = attend
        self._write = write

    def compute(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        params: AttentionParams,
        layer: int,
    ) -> torch.Tensor:
        """Writes to the rows' slots and attends; tensor shapes are the step's, whatever its sessions."""
        all_keys, all_values = self._planes[2 * layer], self._planes[2 * layer + 1]
        self._write(all_keys, self._slots, keys[0])
        self._write(all_values, self._slots, values[0])
        rows = query[0].transpose(0, 1)
        return self._attend(rows, all_keys, all_values, self._metadata[params.window], params).unsqueeze(0)


class GraphRunner:
    """Runs passes as steps of static shape, each size captured by `capture_all`, else on first use.

    Args:
        run: the model's forward.
        model_type: transformers model type, for error messages.
        pool: slots of all sessions; from now on the pool defers its copies until the next pass.
        windows: sliding windows of the layers that have one, in positions.
        groups: largest number of query heads that share a key head.
        max_length: largest number of positions that a session may have.
        vocabulary_size: width of the logits.
        dtype: dtype of the logits.
        taps: hidden states that passes keep.
        digester: makes the digests of wanted rows; None: the host reads the logits themselves.
        attend: attention kernel of a step.
        write: writes a step's keys and values.
        capture: how a step is repeated: eagerly, or as a CUDA graph.
        max_rows: largest number of rows of a step; a pass of more rows is ragged.
    """

    def __init__(
        self,
        run: RunOnDevice,
        model_type: str,
        pool: SlotPool,
        *,
        windows: Sequence[int],
        groups: int,
        max_length: int,
        vocabulary_size: int,
        dtype: torch.dtype,
        taps: FeatureTaps,
        digester: RowDigester | None,
        attend: Attend,
        write: WriteRows = write_indexed,
        capture: Capture,
        max_rows: int = BUCKETS[-1],
    ) -> None:
        self.label = "static"
        """Names the arithmetic of steps in `PackedLM.numerics`."""
        self.around_run: Callable[[], AbstractContextManager[None]] = nullcontext
        """Context manager around the model's forward in a step, while the step is captured too."""
        self._run = run
        self._model_type = model_type
        self._pool = pool
        self._groups = groups
        self._attend, self._write = attend, write
        self._capture = capture
        device = pool.layout.device
        self._max_rows = rows = padded(min(max_rows, BUCKETS[-1]))
        self._taps = taps
        self._digester = digester
        self._captured: dict[GraphShape, Run] = {}
        self._digesting: dict[tuple[int, DigestLevel], Run] = {}
        self._captured_slots = pool.slots
        self._is_complete = False
        self._undigested: set[tuple[int, DigestLevel]] = set()
        self._features: torch.Tensor | None = None
        self._digests: torch.Tensor | None = None
        # No two steps are in flight, so all sizes share the results' memory.
        with torch.inference_mode():
            self._inputs = GraphInputs(rows, windows, rows * -(-max_length // BLOCK), device)
            self._logits = torch.empty(rows, vocabulary_size, dtype=dtype, device=device)
            if digester is not None:
                self._make_room_for_digests(digester)
        pool.deferred = {}

    def _make_room_for_digests(self, digester: RowDigester) -> None:
        words = digester.capacity.words(DigestLevel.SAMPLED)
        device = self._pool.layout.device
        self._digests = torch.empty(self._max_rows, words, dtype=torch.int32, device=device)
        self._inputs.add_asks(ASK_WORDS + digester.capacity.named)

    @property
    def shapes(self) -> list[GraphShape]:
        """Shapes that have been captured."""
        return list(self._captured)

    @property
    def max_rows(self) -> int:
        """Largest number of rows of a step."""
        return self._max_rows

    @property
    def are_graphs(self) -> bool:
        """Whether steps run as captured graphs, not operation by operation."""
        return isinstance(self._capture, CudaGraphs) and not self._capture.refusal

    def recapture(self) -> None:
        """Captures every size anew on its next use: what passes keep, or where slots lie, has changed."""
        self._captured.clear()
        self._features = None
        self._is_complete = False

    @torch.inference_mode()
    def capture_all(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Captures the sizes of steps and digests, so that no step captures one while sessions wait.

        After ``limit_s`` seconds sizes that a step can do without are left out: such a step is padded to the
        next size captured. Raises ModelRefused where the device has no memory for the largest step.
        """
        began = said = clock()
        needed, finer = all_shapes(self._max_rows, self._groups)
        for number, shape in enumerate((*needed, *finer)):
            now = clock()
            if number >= len(needed) and now - began > limit_s:
                log.warning(
                    "%d of %d sizes of steps were captured within capture_s = %g; steps of other sizes are "
                    "padded to these", number, len(needed) + len(finer), limit_s,
                )  # fmt: skip
                break
            if now - said > _PROGRESS_S:
                said = now
                log.info("%d of %d sizes of steps are captured", number, len(needed) + len(finer))
            self._inputs.fill_padding(shape, self._pool.scratch)
            try:
                self.replay(shape)
                for level in DigestLevel if self._digester is not None else ():
                    self._digest(shape.wanted, level)
            except torch.OutOfMemoryError as error:
                raise ModelRefused(
                    f"{self._model_type} is not served: its device has no memory left for a step of "
                    f"{shape.rows} rows; give it less kv_mb ({str(error).partition(chr(10))[0]})",
                    self._model_type,
                ) from error
        self._is_complete = True
        took = {"sizes": len(self._captured), "seconds": round(clock() - began, 1)}
        log.info("sizes of steps were captured", extra={"fields": took})

    def fits(self, plan: PassPlan) -> bool:
        """Whether this pass can run as a step of static shape, and so as a captured graph."""
        return self._inputs.fits(plan, len(self._pool.deferred or ()))

    def forward(
        self, plan: PassPlan, ids: Sequence[int], wanted: Sequence[int], asks: Asks = NO_ASKS
    ) -> Computed:
        """Runs one step; its results lie in the runner's buffers until the next step."""
        shape = self.prepare(plan, ids, wanted, asks)
        self.replay(shape, asks.level)
        return self.results(shape, asks.level, plan.row_count, len(wanted))

    def prepare(
        self, plan: PassPlan, ids: Sequence[int], wanted: Sequence[int], asks: Asks = NO_ASKS
    ) -> GraphShape:
        """Works out the step's inputs on the host and sends them to the device; returns the step's shape."""
        shape = self._shape_of(plan, len(wanted))
        self._inputs.fill(plan, shape, ids, wanted, self._pool.scratch)
        copies = self._inputs.send(self._pool.deferred or {})
        if copies is not None:
            self._pool.move(*copies)
            self._pool.clear_deferred()
        if asks.words is not None:
            self._inputs.send_asks(asks.words)
        return shape

    def replay(self, shape: GraphShape, level: DigestLevel = DigestLevel.PLAIN) -> None:
        """Runs the step of this shape, and its digests, with the inputs that were sent last."""
        if self._captured_slots != self._pool.slots:
            # The pool has grown, so the slots lie at other addresses now.
            self.recapture()
            self._captured_slots = self._pool.slots
        if shape not in self._captured:
            self._captured[shape] = self._capture(self._step_of(shape))
        self._captured[shape]()
        if self._digester is not None:
            self._digest(shape.wanted, level)

    def results(self, shape: GraphShape, level: DigestLevel, rows: int, wanted: int) -> Computed:
        """Results of the last step, of ``rows`` rows in all: views of the runner's buffers."""
        features = None if self._features is None else self._features[:, :rows]
        digests = None
        made = (shape.wanted, level) not in self._undigested
        if self._digester is not None and self._digests is not None and made:
            digests = self._digests[:wanted, : self._digester.capacity.words(level)]
        return Computed(self._logits[:wanted], features, digests)

    def _shape_of(self, plan: PassPlan, wanted: int) -> GraphShape:
        """The smallest shape for the pass; of those captured, once all that are needed have been."""
        shape = graph_shape(plan.rows, wanted, self._groups)
        if not self._is_complete or shape in self._captured:
            return shape
        return smallest_holding(shape, self._captured) or shape

    def _step_of(self, shape: GraphShape) -> Run:
        inputs, rows = self._inputs, shape.rows
        ids, positions = inputs.ids.device[None, :rows], inputs.positions.device[None, :rows]
        slots, wanted = inputs.slots.device[:rows], inputs.wanted.device[: shape.wanted]
        metadata = inputs.metadata(shape)

        def step() -> None:
            cache = PagedCache(self._model_type, self._pool, slots, metadata, self._attend, self._write)
            with self.around_run():
                logits = self._run(cache, ids, positions, wanted)
            cache.finish(self._pool.layout.layers)
            self._logits[: shape.wanted].copy_(logits)
            self._keep_features(rows)

        return step

    def _keep_features(self, rows: int) -> None:
        found = self._taps.take()
        if found is None:
            return
        if self._features is None or self._features.shape[0] != found.shape[0]:
            self._features = found.new_empty(found.shape[0], self._max_rows, found.shape[2])
        self._features[:, :rows].copy_(found)

    def _digest(self, wanted: int, level: DigestLevel) -> None:
        """Digests ``wanted`` rows; once digests have found no memory, such a step goes without them."""
        digest = self._digesting.get((wanted, level))
        if digest is None:
            digest = self._digesting[wanted, level] = self._capture(self._digests_of(wanted, level))
        digest()

    def _digests_of(self, wanted: int, level: DigestLevel) -> Run:
        digester, made = self._digester, self._digests
        assert digester is not None
        assert made is not None

        def digest() -> None:
            if (wanted, level) in self._undigested:
                return
            found = digester.try_compute(self._logits[:wanted], self._inputs.asks.device[:wanted], level)
            if found is None:
                self._undigested.add((wanted, level))
            else:
                made[:wanted, : found.shape[1]].copy_(found)

        return digest
