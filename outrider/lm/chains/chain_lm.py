"""A causal language model whose sessions are chains: each runs by itself, through the library's own cache.

For models that a packed tree pass cannot run: recurrent and convolutional layers, whose state has one past,
and attention of a model's own. A pass makes one call of the model's forward for each session, more where a
state has to be kept on the way. Everything else is as for `PackedLM`.
"""

import inspect
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from outrider.lm import transfer
from outrider.lm.chains.layers import CacheShape, CallSlots, OpenCache, State, UnknownLayer, watch
from outrider.lm.chains.pool import LEAST_TABLES, PLACES, ChainMemory, ChainPool, least_bytes
from outrider.lm.chains.table import ChainTable, Ran
from outrider.lm.compiled.compiler import Passes
from outrider.lm.compiled.kernel_builder import KernelBuilder
from outrider.lm.device.layout import Asks
from outrider.lm.device.placement import CPU_KV_MB
from outrider.lm.graphs.graph_runner import Computed
from outrider.lm.kv.pool import GuestRoom, KVLayout, SlotPool
from outrider.lm.load.check import CHAINS, Trial
from outrider.lm.load.layout import ModelShape
from outrider.lm.load.model import longest_context
from outrider.lm.load.source import first_line
from outrider.lm.outcome import OutcomeWants
from outrider.lm.plan import PackedRows, PassPlan, kept_rows
from outrider.lm.runner import PackedLM
from speculative.errors import InvalidRequest, ModelRefused

log = logging.getLogger(__name__)

UNNAMED_CONTEXT = 32_768
"""Positions of a session of a model that attends nowhere and whose config names no longest context."""

_CACHE_ARGUMENTS = ("past_key_values", "cache_params")
"""How families call the cache among the arguments of their forward."""


class ChainLM(PackedLM):
    """A causal language model without branches: every session's rows in a pass are one chain."""

    attention = "eager"

    def __init__(self, model: PreTrainedModel, **options: object) -> None:
        """Takes over ``model``; options as for `PackedLM`, but for guests and the deterministic profile.

        Raises ModelRefused if the library's cache keeps something of the model that is not known here.
        """
        if model.device.type != "cpu":
            raise _refusal(model.config.model_type, f"chains run on the CPU alone, not on {model.device}")
        arguments = inspect.signature(model.forward).parameters
        self._cache_argument = next((name for name in _CACHE_ARGUMENTS if name in arguments), "")
        self._takes_positions = "position_ids" in arguments
        self.a_row_at_a_time = False
        """Whether the model's forward continues a state by single rows alone."""
        super().__init__(model, **options)  # type: ignore[arg-type]  # they are checked where they are given

    @property
    def passes(self) -> str:
        """``chains``, or ``chains by rows`` where every row behind a state is a call of the model."""
        return "chains by rows" if self.a_row_at_a_time else "chains"

    @property
    def numerics(self) -> str:
        """Device type and dtype of the model's arithmetic, and ``chains``."""
        return f"{super().numerics} chains"

    @property
    def wants(self) -> OutcomeWants:
        """What passes give beside digests; hidden states are not among them."""
        return self._wants

    @wants.setter
    def wants(self, wants: OutcomeWants) -> None:
        if wants.features:
            raise self._refusal("heads draft from hidden states, which passes without branches do not keep")
        self._wants = OutcomeWants(wants.top)

    def first_trial(self) -> Trial:
        """The check at load, by chains alone. Raises ModelRefused."""
        return Trial.of(self, CHAINS)

    def settle(self, trial: Trial | None, ranks: int, int8: bool = False, kv_mb: int | None = None) -> None:
        """Checks the passes; a model that fails may run its rows one by one. Raises ModelRefused."""
        if int8:
            raise self._refusal("keys and values in int8 are for packed passes; leave kv_dtype out")
        if trial is None:
            return
        try:
            trial.verify(self)
        except ModelRefused:
            if not self._shape.state_bytes:
                raise
            self.a_row_at_a_time = True
            trial.verify(self)
            log.info("%s takes up its state for single rows alone: drafts save no time", self.model_type)

    def longest_context(self) -> int:
        """Largest number of positions that a session may have. Raises ModelRefused."""
        if self._shape.planes:
            return longest_context(self.model.config)
        try:
            return longest_context(self.model.config)
        except ModelRefused:
            return UNNAMED_CONTEXT

    def first_pool(self, layout: KVLayout, kv_mb: int | None) -> SlotPool:
        """Slots and places for states. Raises ModelRefused where ``kv_mb`` is too little."""
        memory = (CPU_KV_MB if kv_mb is None else kv_mb) * 2**20
        state = self._shape.state_bytes
        least = least_bytes(layout.slot_bytes, state)
        if memory < least:
            raise self._refusal(
                f"a session's states take {PLACES * state / 2**20:.1f} MiB, so that {LEAST_TABLES} sessions "
                f"need kv_mb = {-(-least // 2**20)} or more; kv_mb is {memory // 2**20}"
            )
        divided = ChainMemory.divide(memory, layout.slot_bytes, state, self.max_length)
        return ChainPool(layout, divided, state)

    def _pool_layout(self, found: KVLayout, guest: GuestRoom | None) -> KVLayout:
        """The model's own layout. Raises ModelRefused for what needs packed passes."""
        if guest is not None:
            raise self._refusal("heads draft from hidden states, which passes without branches do not keep")
        if self.profile.weight_dtype != "auto":
            raise self._refusal(
                f"weight_dtype = {self.profile.weight_dtype} is for packed passes; leave weight_dtype out"
            )
        if self.profile.label:
            raise self._refusal(f"the {self.profile.label.split()[0]} profile computes packed passes alone")
        return found

    def find_layout(self) -> ModelShape:
        """Cache layout and logit width of the model, found by sending one row through it."""
        row = torch.zeros(1, 1, dtype=torch.long, device=self._device)
        found: list[torch.Tensor] = []

        def run(cache: DynamicCache) -> None:
            found.append(self._call(cache, row, 0, 1))

        if not self._cache_argument:
            raise self._refusal("its forward takes no cache of the library's")
        try:
            with torch.inference_mode():
                self._shape: CacheShape = watch(run, self.model.config)
        except UnknownLayer as error:
            raise self._refusal(f"its cache has layers of the kind {error}") from error
        except Exception as error:
            why = f"its forward fails with {type(error).__name__}: {first_line(error)}"
            raise self._refusal(why) from error
        shape, logits = self._shape, found[0]
        if not shape.planes and not shape.state_bytes:
            raise self._refusal("it keeps nothing in the library's cache")
        if len(shape.dtypes) > 1:
            raise self._refusal(f"its layers cache in several dtypes: {sorted(map(str, shape.dtypes))}")
        layout = KVLayout(shape.planes, next(iter(shape.dtypes), logits.dtype), self._device)
        return ModelShape(layout, logits.shape[-1], logits.dtype, (), 1)

    def compile_passes(self, passes: Passes, cache_dir: Path | None = None) -> None:
        """Leaves passes as they are, and builds the kernel that chooses tokens.

        Raises InvalidRequest where passes have to be compiled.
        """
        self.trial = None
        if passes == "compiled":
            raise InvalidRequest(f"passes of {self.model_type} cannot be compiled: they run {self.passes}")
        self.builder = KernelBuilder.beside(self._device, cache_dir)

    def _run(self, plan: PassPlan, ids: list[int], wanted: list[int], asks: Asks | None) -> Computed:
        """Runs each session's rows, one session after another."""
        parts = []
        at = 0
        for rows in plan.rows:
            if not rows.is_chain or rows.table.nodes:
                raise ValueError(f"passes of {self.model_type} run chains, not branches")
            behind = at
            while behind < len(wanted) and wanted[behind] < rows.high:
                behind += 1
            mine = [row - rows.low for row in wanted[at:behind]]
            parts += self._run_session(rows, ids[rows.low : rows.high], mine)
            at = behind
        logits = torch.cat(parts) if len(parts) != 1 else parts[0]
        return Computed(logits, None, None)

    def _run_session(self, rows: PackedRows, ids: Sequence[int], wanted: Sequence[int]) -> list[torch.Tensor]:
        """Runs one session's owed ids and its rows; returns the logits of the wanted rows, piece by piece."""
        table = rows.table
        assert isinstance(table, ChainTable), "tables come from the model's pool"
        cache = self._shape.open(table.state)
        states: dict[int, State] = {}
        parts = []
        line, begin = [*table.owed, *ids], -len(table.owed)
        for end in [*table.cuts(len(ids)), len(ids)]:
            piece, line = line[: end - begin], line[end - begin :]
            kept = [row - begin for row in wanted if begin <= row < end]
            parts.append(self._piece(cache, table, table.length + begin, piece, kept))
            states[end] = cache.state(final=not line)
            begin = end
        table.ran = Ran(ids, states)
        return parts

    def _piece(
        self, cache: OpenCache, table: ChainTable, low: int, ids: Sequence[int], kept: Sequence[int]
    ) -> torch.Tensor:
        """Logits of the ``kept`` of these ids, which stand at position ``low`` and behind it."""
        together = not self.a_row_at_a_time or not low
        step = len(ids) if together else 1
        found = []
        for at in range(0, len(ids), step):
            cache.attach(CallSlots(self.pool, table, low + at, low + at + step))
            rows = transfer.indices([list(ids[at : at + step])], self._device)
            of_these = [row - at for row in kept if at <= row < at + step]
            found.append(self._call(cache.cache, rows, low + at, kept_rows(of_these, step, self._device)))
        return torch.cat(found) if len(found) > 1 else found[0]

    def _call(self, cache: Cache, rows: torch.Tensor, low: int, kept: int | torch.Tensor) -> torch.Tensor:
        """One call of the model's forward over ``[1, rows]`` ids from position ``low`` on.

        Returns the logits of the ``kept`` rows.
        """
        extra: dict[str, Any] = {self._cache_argument: cache}
        if self._keeps_logits:
            extra["logits_to_keep"] = kept
        if self._takes_positions:
            extra["position_ids"] = torch.arange(low, low + rows.shape[1], device=self._device)[None]
        output = self.model(input_ids=rows, use_cache=True, **extra)
        logits: torch.Tensor = output.logits[0]
        if not self._keeps_logits:
            logits = logits[-kept:] if isinstance(kept, int) else logits[kept]
        return logits

    def _refusal(self, why: str) -> ModelRefused:
        return _refusal(self.model_type, why)


def _refusal(model_type: str, why: str) -> ModelRefused:
    return ModelRefused(f"{model_type} is not served in chains: {why}", model_type)
