"""Steps of static shape: how decoding runs on a GPU, as one captured graph per size.

Rows are padded to a few sizes, and all inputs and results lie at fixed addresses. So a step is one copy up,
one replay and one copy of digests down, however many sessions share the step. Logits and hidden states stay
in buffers that all sizes share, until the next step. Passes beyond the largest size (long chunks of a prompt)
and sessions with very many nodes run as ragged passes (`outrider.lm.attention`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from outrider.lm.attention.interface import AttentionParams, PackedCache
from outrider.lm.attention.metadata import Attend, AttentionMetadata
from outrider.lm.attention.partition import BUCKETS, GraphShape, graph_shape
from outrider.lm.device.digest import RowDigester
from outrider.lm.device.layout import ASK_WORDS, NO_ASKS, Asks, DigestLevel
from outrider.lm.features import FeatureTaps
from outrider.lm.graphs.capture import Capture, Run
from outrider.lm.graphs.inputs import GraphInputs
from outrider.lm.kv.blocks import BLOCK
from outrider.lm.kv.pool import SlotPool
from outrider.lm.plan import PassPlan

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


class PagedCache(PackedCache):
    """The KV cache of one static step: writes each row's keys and values to its slot, then attends."""

    def __init__(
        self,
        model_type: str,
        pool: SlotPool,
        slots: torch.Tensor,
        metadata: Mapping[int | None, AttentionMetadata],
        attend: Attend,
    ) -> None:
        super().__init__(model_type)
        self._planes = pool.planes()
        self._slots = slots
        self._metadata = metadata
        self._attend = attend

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
        all_keys.index_copy_(1, self._slots, keys[0])
        all_values.index_copy_(1, self._slots, values[0])
        rows = query[0].transpose(0, 1)
        return self._attend(rows, all_keys, all_values, self._metadata[params.window], params).unsqueeze(0)


class GraphRunner:
    """Runs passes as steps of static shape, each size captured on first use.

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
        capture: how a step is repeated: eagerly, or as a CUDA graph.
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
        capture: Capture,
    ) -> None:
        self._run = run
        self._model_type = model_type
        self._pool = pool
        self._groups = groups
        self._attend = attend
        self._capture = capture
        device = pool.layout.device
        blocks = min(BUCKETS[-1] * (-(-max_length // BLOCK)), 8 * pool.max_blocks)
        self._taps = taps
        self._digester = digester
        self._captured: dict[tuple[GraphShape, DigestLevel], Run] = {}
        self._captured_slots = pool.slots
        # No two steps are in flight, so all sizes share the results' memory.
        rows = BUCKETS[-1]
        with torch.inference_mode():
            self._inputs = GraphInputs(windows, blocks, device)
            self._logits = torch.empty(rows, vocabulary_size, dtype=dtype, device=device)
            self._features: torch.Tensor | None = None
            self._digests: torch.Tensor | None = None
            if digester is not None:
                words = digester.capacity.words(DigestLevel.SAMPLED)
                self._digests = torch.empty(rows, words, dtype=torch.int32, device=device)
                self._inputs.add_asks(ASK_WORDS + digester.capacity.named)
        self._undigested: set[tuple[GraphShape, DigestLevel]] = set()
        pool.deferred = {}

    @property
    def shapes(self) -> list[GraphShape]:
        """Shapes that have been captured, at any level of digests."""
        return list(dict.fromkeys(shape for shape, _ in self._captured))

    def recapture(self) -> None:
        """Captures every size anew on its next use: what passes keep has changed."""
        self._captured.clear()
        self._features = None

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
        shape = graph_shape(plan.rows, self._groups)
        self._inputs.fill(plan, shape, ids, wanted, self._pool.scratch)
        copies = self._inputs.send(self._pool.take_deferred())
        if copies is not None:
            self._pool.move(*copies)
        if asks.words is not None:
            self._inputs.send_asks(asks.words)
        return shape

    def replay(self, shape: GraphShape, level: DigestLevel = DigestLevel.PLAIN) -> None:
        """Runs the step of this shape with the inputs that were sent last, as a captured graph."""
        if self._captured_slots != self._pool.slots:
            # The pool has grown, so the slots lie at other addresses now.
            self._captured.clear()
            self._captured_slots = self._pool.slots
        if (shape, level) not in self._captured:
            self._captured[shape, level] = self._capture(self._step_of(shape, level))
        self._captured[shape, level]()

    def results(self, shape: GraphShape, level: DigestLevel, rows: int, wanted: int) -> Computed:
        """Results of the last step, of ``rows`` rows in all: views of the runner's buffers."""
        features = None if self._features is None else self._features[:, :rows]
        digests = None
        made = self._digests is not None and (shape, level) not in self._undigested
        if self._digester is not None and self._digests is not None and made:
            digests = self._digests[:wanted, : self._digester.capacity.words(level)]
        return Computed(self._logits[:wanted], features, digests)

    def _step_of(self, shape: GraphShape, level: DigestLevel) -> Run:
        inputs, rows = self._inputs, shape.rows
        ids, positions = inputs.ids.device[None, :rows], inputs.positions.device[None, :rows]
        slots, wanted = inputs.slots.device[:rows], inputs.wanted.device[:rows]
        metadata = inputs.metadata(shape)

        def step() -> None:
            cache = PagedCache(self._model_type, self._pool, slots, metadata, self._attend)
            logits = self._run(cache, ids, positions, wanted)
            cache.finish(self._pool.layout.layers)
            self._logits[:rows].copy_(logits)
            self._keep_features(rows)
            self._digest(shape, level)

        return step

    def _keep_features(self, rows: int) -> None:
        found = self._taps.take()
        if found is None:
            return
        if self._features is None or self._features.shape[0] != found.shape[0]:
            self._features = found.new_empty(found.shape[0], BUCKETS[-1], found.shape[2])
        self._features[:, :rows].copy_(found)

    def _digest(self, shape: GraphShape, level: DigestLevel) -> None:
        """Digests the step's rows; a step whose digests find no memory goes without them from then on."""
        if self._digester is None or self._digests is None or (shape, level) in self._undigested:
            return
        rows = shape.rows
        found = self._digester.try_compute(self._logits[:rows], self._inputs.asks.device[:rows], level)
        if found is None:
            self._undigested.add((shape, level))
        else:
            self._digests[:rows, : found.shape[1]].copy_(found)
