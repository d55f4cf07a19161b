"""Steps of static shape: how decoding runs on a GPU, as one captured graph per size.

Rows are padded to a few sizes and all inputs lie at fixed addresses. So a step is one copy up, one replay and
one copy of the wanted logits down, however many sessions share the step. Passes beyond the largest size (long
chunks of a prompt) and sessions with very many nodes run as ragged passes (`outrider.lm.attention`).
"""

from collections.abc import Callable, Mapping, Sequence

import torch

from outrider.lm import transfer
from outrider.lm.attention.interface import AttentionParams, PackedCache
from outrider.lm.attention.metadata import Attend, AttentionMetadata
from outrider.lm.attention.partition import BUCKETS, GraphShape, graph_shape
from outrider.lm.graphs.capture import Capture, Run
from outrider.lm.graphs.inputs import GraphInputs
from outrider.lm.kv.blocks import BLOCK
from outrider.lm.kv.pool import SlotPool
from outrider.lm.plan import PassPlan

RunOnDevice = Callable[[PackedCache, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""The model's forward: cache, ids and positions ``[1, rows]``, wanted row indices, to logits."""


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
        with torch.inference_mode():
            self._inputs = GraphInputs(windows, blocks, device)
        self._captured: dict[GraphShape, Run] = {}
        self._captured_slots = pool.slots
        self._logits: dict[GraphShape, torch.Tensor] = {}
        pool.deferred = {}

    @property
    def shapes(self) -> list[GraphShape]:
        """Shapes that have been captured."""
        return list(self._captured)

    def fits(self, plan: PassPlan) -> bool:
        """Whether this pass can run as a step of static shape, and so as a captured graph."""
        return self._inputs.fits(plan, len(self._pool.deferred or ()))

    def forward(self, plan: PassPlan, ids: Sequence[int], wanted: Sequence[int]) -> torch.Tensor:
        """Runs one step; float32 logits of the pass's wanted rows on the host."""
        shape = self.prepare(plan, ids, wanted)
        self.replay(shape)
        return self.fetch(shape, len(wanted))

    def prepare(self, plan: PassPlan, ids: Sequence[int], wanted: Sequence[int]) -> GraphShape:
        """Works out the step's inputs on the host and sends them to the device; returns the step's shape."""
        shape = graph_shape(plan.rows, self._groups)
        self._inputs.fill(plan, shape, ids, wanted, self._pool.scratch)
        copies = self._inputs.send(self._pool.take_deferred())
        if copies is not None:
            self._pool.move(*copies)
        return shape

    def replay(self, shape: GraphShape) -> None:
        """Runs the step of this shape with the inputs that were sent last, as a captured graph."""
        if self._captured_slots != self._pool.slots:
            # The pool has grown, so the slots lie at other addresses now.
            self._captured.clear()
            self._captured_slots = self._pool.slots
        if shape not in self._captured:
            self._captured[shape] = self._capture(self._step_of(shape))
        self._captured[shape]()

    def fetch(self, shape: GraphShape, count: int) -> torch.Tensor:
        """Float32 logits of the last step's first ``count`` wanted rows, on the host."""
        return transfer.download(self._logits[shape][:count])

    def _step_of(self, shape: GraphShape) -> Run:
        inputs, rows = self._inputs, shape.rows
        ids, positions = inputs.ids.device[None, :rows], inputs.positions.device[None, :rows]
        slots, wanted = inputs.slots.device[:rows], inputs.wanted.device[:rows]
        metadata = inputs.metadata(shape)

        def step() -> None:
            cache = PagedCache(self._model_type, self._pool, slots, metadata, self._attend)
            logits = self._run(cache, ids, positions, wanted)
            cache.finish(self._pool.layout.layers)
            self._logits[shape] = logits.float()

        return step
