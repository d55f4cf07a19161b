"""One packed tree pass over any causal language model that passes the check.

``PackedLM.forward`` runs the rows of any number of sessions, each with a token tree of any shape, in one
call of the model's own forward. Knows nothing about sampling, drafts or services. A `PackedLM` belongs to
the engine thread: no two threads may call it at a time.
"""

import inspect
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from transformers import PreTrainedModel

from outrider.lm import transfer
from outrider.lm.attention.interface import ACTIVE, ATTENTION, PackedCache
from outrider.lm.autotune.threads import ThreadBounds, measure_threads
from outrider.lm.compiled.compiler import PassCompiler, Passes
from outrider.lm.compiled.kernel_builder import KernelBuilder
from outrider.lm.compiled.package import CompiledRunner
from outrider.lm.device.digest import digester_for
from outrider.lm.device.layout import NO_ASKS, Asks
from outrider.lm.device.memory import chosen, first_pool, fit_pool
from outrider.lm.device.outcome import DeviceOutcome
from outrider.lm.device.placement import CPU_KV_MB, GpuOptions, find_device, keep_products_exact
from outrider.lm.features import FeatureTaps
from outrider.lm.graphs.graph_runner import Computed, GraphRunner
from outrider.lm.heads.target_parts import TargetPart, TargetParts
from outrider.lm.kv.pool import COMPILED, EAGER, GuestRoom, KVLayout, SlotPool
from outrider.lm.kv.table import SlotTable
from outrider.lm.load.added_embeddings import grow_embeddings
from outrider.lm.load.check import Trial
from outrider.lm.load.int8_kv import keep_in_int8
from outrider.lm.load.layout import ModelShape, find_layout
from outrider.lm.load.model import (
    LoadedTokenizer,
    end_ids,
    load_model,
    load_tokenizer,
    longest_context,
    sampling_defaults,
)
from outrider.lm.load.part import ModelPart, PartOf
from outrider.lm.outcome import MOST_TOP, HostOutcome, Outcome, OutcomeWants, TransferCounts
from outrider.lm.parallel.rank_group import RankGroup
from outrider.lm.parallel.whole_parts import gather_parts
from outrider.lm.plan import PassPlan, SequenceRows, kept_rows, rows_asked
from outrider.lm.profile import FastProfile, Profile
from outrider.lm.step_profile import StepProfile
from outrider.lm.weight_only.packing import WeightDtype
from outrider.lm.weight_only.profile import profile_of
from speculative.errors import InvalidRequest, ModelRefused

log = logging.getLogger(__name__)


class PackedLM:
    """A causal language model and the KV slots of its sessions."""

    attention = ATTENTION
    """Name of the attention function that the model's layers call."""
    compiled: CompiledRunner | None = None
    """Runner of compiled passes on the CPU; None: passes are eager."""
    compiler: PassCompiler | None = None
    """Compiles passes beside serving; None unless `compile_passes` was asked to."""
    builder: KernelBuilder | None = None
    """Builds the kernel that chooses tokens beside eager passes; None elsewhere."""
    most_helped: int | None = None
    """The most threads of compiled passes, chosen by measuring; None: as many as torch has."""
    trial: Trial | None = None
    """The check at load, by which compiled passes are checked; None without a check, and once it was used."""
    part_of: PartOf | None = None
    """The model of which this one is a part; None: it is whole."""
    whole_parts: TargetParts | None = None
    """Layers that `load` gathered for the heads of rank 0; None elsewhere."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        name: str = "",
        kv_mb: int | None = CPU_KV_MB,
        tokenizer: LoadedTokenizer | None = None,
        profile: Profile | None = None,
        guest: GuestRoom | None = None,
        gpu: GpuOptions | None = None,
    ) -> None:
        """Takes over ``model``: from now on it runs packed passes only.

        ``kv_mb`` bounds the keys and values of all sessions together, in MiB, and what a ``guest`` keeps
        beside them; None: CPU_KV_MB on the CPU, and on a GPU what is free until `fit_pool` sets the bound.
        ``profile`` is the fast one by default; the deterministic one holds once ``pack`` was called. Raises
        ModelRefused if not every layer attends through the attention interface.
        """
        self.model = model
        self.name = name
        self.model_type: str = model.config.model_type
        self.eos_ids = end_ids(model)
        self.tokenizer_json = None if tokenizer is None else tokenizer.json
        """The tokenizer beside the model as ``tokenizers`` JSON, or None."""
        self.chat = None if tokenizer is None else tokenizer.chat
        """The tokenizer's chat template, or None."""
        self.forward_calls = 0
        """Number of forward calls since the model was loaded."""
        self.rows = 0
        """Number of input rows (tokens) over all forward calls."""
        self.around_pass: Callable[[Sequence[SequenceRows]], AbstractContextManager[None]] = lambda _: (
            nullcontext()
        )
        """Context manager around the model's part of every pass; entered once the rows are checked."""
        self._device, self._on_device = model.device, transfer.current(model.device)
        self.gpu = gpu or GpuOptions()
        """How passes run on a GPU."""
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        model.config._attn_implementation = self.attention
        self.profile: Profile = FastProfile() if profile is None else profile
        """How passes are laid out and computed."""
        found = self.find_layout()
        self.max_length = self.longest_context()
        """Largest number of positions that a session may have."""
        self.vocabulary_size = self.known_ids = found.vocabulary_size
        """Width of the logits, and the number of ids that a row may have; see `add_embeddings`."""
        self.windows = found.windows
        """Sliding windows of the layers that have one, in positions."""
        self.groups = found.groups
        """Largest number of query heads that share a key head."""
        self.steps: GraphRunner | None = None
        """Runner of steps of static shape on a GPU; None: all passes are ragged."""
        layout = self._pool_layout(found.layout, guest)
        self.pool = self.first_pool(layout, kv_mb)
        self._mask_dtype = found.layout.dtype
        self.logits_dtype = found.logits_dtype
        """dtype of the logits on the device."""
        self.taps = FeatureTaps()
        """Keeps the hidden states that `wants` names."""
        self.digester = digester_for(self.vocabulary_size, self._device)
        """Makes digests on the device; None where host and device share the memory."""
        self.transfers = TransferCounts()
        """What outcomes have copied from the device."""
        self._wants = OutcomeWants()
        self._gone: Callable[[], None] = lambda: None
        """Marks the rows of the last outcome as overwritten."""
        if tokenizer is not None and tokenizer.highest_id >= self.vocabulary_size:
            why = f"its tokenizer gives ids up to {tokenizer.highest_id}, it knows {self.vocabulary_size}"
            raise ModelRefused(f"{self.model_type} is not served: {why}", self.model_type)

    @classmethod
    def load(
        cls,
        path_or_id: str | Path,
        *,
        device: str = "cpu",
        dtype: str = "float32",
        threads: int | ThreadBounds = 1,
        check: bool = True,
        kv_mb: int | None = CPU_KV_MB,
        rank_group: RankGroup | None = None,
        whole: Sequence[TargetPart] = (),
        deterministic: bool = False,
        guest: GuestRoom | None = None,
        cache_dir: Path | None = None,
        gpu: GpuOptions | None = None,
        part: ModelPart | None = None,
        weight_dtype: WeightDtype = "auto",
        int8_kv: bool = False,
    ) -> "PackedLM":
        """Loads a Hugging Face folder or id; checks that packed passes compute what the model's forward does.

        ``device`` and ``dtype`` may be ``auto`` (`outrider.lm.device.placement`). ``int8_kv`` keeps keys and
        values in int8; without ``kv_mb`` they get what a trial of the largest step leaves of a GPU.
        ``threads``: torch's number for the process, or bounds of a measurement on the CPU. Each rank of a
        ``rank_group`` gets its part of the model, rank 0 also the ``whole`` layers; all make the same call.
        ``guest``: room for a drafting layer beside keys and values. ``cache_dir`` keeps times of kernels for
        later processes. ``part``: layers and sublayers that are kept. ``weight_dtype``: see `weight_only`.

        Raises InvalidRequest if there is no such model, layer or device, ModelRefused (naming the model type)
        if it cannot be served exactly, under the ``deterministic`` profile to the bit, or as ``gpu`` asks.
        """
        profile = profile_of(deterministic, weight_dtype, cache_dir)
        ranks = 1 if rank_group is None else rank_group.info.size
        where = find_device(device)
        most = threads if isinstance(threads, int) else threads.eager
        profile.check_settings(str(where), most, ranks)
        torch.set_num_threads(most)
        source = str(path_or_id)
        with transfer.current(where):
            if where.type == "cuda":
                keep_products_exact()
            model = load_model(source, device=str(where), dtype=dtype, ranks=ranks)
            profile.prepare(model)
            part_of = None if part is None else part.apply(model)
            if rank_group is not None:
                rank_group.meet("loaded")
            whole_parts = None if rank_group is None else gather_parts(model, whole, rank_group)
            name = Path(source).name if Path(source).is_dir() else source
            tokenizer = load_tokenizer(source)
            lm = cls(
                model, name=name, kv_mb=kv_mb, tokenizer=tokenizer, profile=profile, guest=guest, gpu=gpu
            )
            trial = lm.first_trial() if check else None
            if isinstance(threads, ThreadBounds) and ranks == 1 and where.type == "cpu":
                lm.most_helped = threads.compiled
                measure_threads(lm, most)
                lm.forward_calls = lm.rows = 0
            lm.settle(trial, ranks, int8_kv, kv_mb)
            if where.type == "cuda" and kv_mb is None:
                fit_pool(lm, (lambda slots: slots) if rank_group is None else rank_group.least)
        lm.trial, lm.part_of, lm.whole_parts = trial, part_of, whole_parts
        log.info("the model is loaded", extra={"fields": chosen(lm)})
        return lm

    def first_trial(self) -> Trial:
        """The check at load, before the model is changed. Raises ModelRefused."""
        return Trial.of(self)

    def settle(self, trial: Trial | None, ranks: int, int8: bool = False, kv_mb: int | None = None) -> None:
        """Packs linear layers, checks the passes and chooses how they run. Raises ModelRefused."""
        if self.profile.can_pack(self.model, ranks):
            self.pack()
        if trial is not None:
            trial.verify(self)
        if int8:
            trial = keep_in_int8(self, trial, kv_mb)
        self.profile.settle(self, trial, ranks)

    def longest_context(self) -> int:
        """Largest number of positions that a session may have. Raises ModelRefused."""
        return longest_context(self.model.config)

    def first_pool(self, layout: KVLayout, kv_mb: int | None) -> SlotPool:
        """The pool of all sessions, of ``kv_mb`` MiB."""
        return first_pool(layout, kv_mb)

    def add_embeddings(self, rows: torch.Tensor) -> range:
        """Ids behind the vocabulary for embeddings ``[count, width]``; call it before passes are compiled."""
        first, self.known_ids = self.known_ids, grow_embeddings(self.model, self.known_ids, rows)
        return range(first, self.known_ids)

    def capture_steps(self) -> None:
        """Captures all sizes of static steps now, so that none is captured while sessions wait.

        Does nothing where passes are ragged. Call it once `wants` is set. Raises ModelRefused where the
        device has no memory for the largest step.
        """
        if self.steps is not None:
            with self._on_device:
                self.steps.capture_all(self.gpu.capture_s)

    @property
    def passes(self) -> str:
        """How passes run: eager or compiled on a CPU; on a GPU ``ragged``, ``static`` or ``graphs``."""
        if self.compiled is not None:
            return "compiled"
        if self.steps is None:
            return "eager" if self._device.type == "cpu" else "ragged"
        return "graphs" if self.steps.are_graphs else "static"

    def compile_passes(self, passes: Passes, cache_dir: Path | None = None) -> None:
        """Has passes run as ``passes`` says; call it after `wants` was set and before the first session.

        ``auto`` compiles beside serving: passes are eager until a package is ready, and stay eager where none
        can be made. ``compiled`` waits for the package, and raises InvalidRequest where there is none. A
        package in ``cache_dir`` is used at once. ``eager`` compiles the kernel that chooses tokens alone.
        Static steps stay as `load` made them. Raises ValueError for a model that was not checked at load.
        """
        trial, self.trial = self.trial, None
        if passes == "eager" or (self.steps is not None and self.gpu.compile_layers):
            self.builder = KernelBuilder.beside(self._device, cache_dir)
            return
        if trial is None:
            raise ValueError("a model that was not checked at load runs eager passes only")
        self.compiler = PassCompiler(self, trial, cache_dir)
        self.compiler.start()
        self.compiler.wait(for_child=passes == "compiled")
        self.take_compiled()
        if passes == "compiled" and self.compiled is None:
            raise InvalidRequest(f"passes of {self.model_type} cannot be compiled: {self.compiler.failure}")

    def use_compiled(self, runner: CompiledRunner | None) -> None:
        """Runs passes by a compiled package from the next one on, or eagerly; begins a new numerics class."""
        self.compiled = runner
        self.pool.begin_class(EAGER if runner is None else COMPILED)

    def close(self) -> None:
        """Ends what the model does beside its passes."""
        for beside in (self.compiler, self.builder):
            if beside is not None:
                beside.close()

    def take_profile(self) -> StepProfile | None:
        """How long compiled passes take, if passes were compiled since the last call; else None."""
        return None if self.compiled is None else self.compiled.take_profile()

    def take_compiled(self) -> None:
        """Runs compiled passes from now on if they have become ready."""
        if self.compiler is not None and (ready := self.compiler.take()) is not None:
            self.use_compiled(ready)

    def pack(self) -> None:
        """Replaces the linear layers by packed ones, as the profile has them; their own weights are freed."""
        self.profile.pack(self)

    @property
    def sampling_defaults(self) -> dict[str, float]:
        """Sampling parameters that the checkpoint's generation config sets, by name."""
        return sampling_defaults(self.model)

    @property
    def numerics(self) -> str:
        """Device type, dtype and profile of the arithmetic, the kind of passes where it matters, int8 slots.

        Under the deterministic profile two models with the same string give the same bits: the string ends in
        a digest of logits, which depend on weights, kernels and their versions.
        """
        dtype = str(self.model.dtype).removeprefix("torch.")
        passes = "" if self._device.type == "cpu" else "ragged" if self.steps is None else self.steps.label
        passes = "compiled" if self.compiled is not None else passes
        kept = "int8-kv" if self.pool.layout.int8 else ""
        return " ".join(part for part in (self._device.type, dtype, passes, self.profile.label, kept) if part)

    def table(self, reserve: int = 0, room: int = 0) -> SlotTable:
        """A slot table for a new session: ``reserve`` slots at once, more as passes need them.

        ``room`` is the number of slots that the session may come to need; the pool places its first block
        accordingly. Raises Overloaded where the pool lacks ``reserve`` slots.
        """
        table = self.pool.table(max(reserve, room))
        table.reserve(reserve)
        return table

    def release(self, table: SlotTable) -> None:
        """Gives a session's slots back to the pool."""
        table.close()

    @property
    def wants(self) -> OutcomeWants:
        """What passes give beside digests. Set it once, before the first pass."""
        return self._wants

    @wants.setter
    def wants(self, wants: OutcomeWants) -> None:
        if not 0 <= wants.top <= MOST_TOP:
            raise ValueError(f"top is 0 to {MOST_TOP}, not {wants.top}")
        self.taps.tap(self.model, wants.features)
        self._wants = wants
        self.compiled = None
        if self.steps is not None:
            self.steps.recapture()

    def forward(self, sequences: Sequence[SequenceRows]) -> Outcome:
        """One pass over the rows of all sessions: one call of the model's forward.

        The outcome's wanted rows are in order of ``sequences`` and, within each, of ``want``. Afterwards the
        rows are nodes of their tables. Raises Overloaded (nothing changed) if the slots do not suffice,
        ValueError for sequences that contradict themselves.
        """
        self._gone()
        self.take_compiled()
        if self.digester is None:
            computed = self._pass(sequences)
            return HostOutcome(computed.logits, computed.features)
        capacity = self.digester.capacity
        asks = Asks.of(rows_asked(sequences), capacity, self._wants.top)
        computed = self._pass(sequences, asks)
        down = None if computed.digests is None else computed.digests.numpy()
        outcome = DeviceOutcome(computed.logits, computed.features, down, asks, capacity, self.transfers)
        self._gone = outcome.expire
        return outcome

    def repeat(self, sequences: Sequence[SequenceRows]) -> None:
        """As `forward`, for a rank that repeats rank 0's pass: no digest is made and nothing copied."""
        self._pass(sequences)

    def _pass(self, sequences: Sequence[SequenceRows], asks: Asks | None = None) -> Computed:
        """Runs one pass; where there are ``asks``, its digests are in the host's memory."""
        if not sequences:
            raise ValueError("a pass needs at least one sequence")
        with torch.inference_mode(), self._on_device:
            plan = PassPlan(sequences, self.pool, self._mask_dtype)
            plan.check(sequences, self.known_ids, self.max_length)
            ids, wanted = plan.ids(sequences), plan.wanted(sequences)
            with self.around_pass(sequences):
                computed = self._run(plan, ids, wanted, asks)
                if asks is not None and computed.digests is not None:
                    computed = computed._replace(digests=transfer.download(computed.digests))
        plan.keep_nodes()
        self.forward_calls += 1
        self.rows += plan.row_count
        return computed

    def _run(self, plan: PassPlan, ids: list[int], wanted: list[int], asks: Asks | None) -> Computed:
        """Runs a pass as a static step, compiled, or with shapes that follow its sessions."""
        if self.steps is not None and self.steps.fits(plan):
            return self.steps.forward(plan, ids, wanted, asks or NO_ASKS)
        if self.compiled is not None:
            try:
                return self.compiled.forward(plan, ids, wanted)
            except RuntimeError as error:
                # The same pass runs once more: it writes the same slots.
                log.warning("passes of %s are eager from now on: %s", self.model_type, error)
                self.use_compiled(None)
        return self._run_ragged(plan, ids, wanted, asks)

    def _run_ragged(self, plan: PassPlan, ids: list[int], wanted: list[int], asks: Asks | None) -> Computed:
        """Runs a pass whose tensor shapes follow its sessions; makes digests where there are ``asks``."""
        self.pool.settle()
        fill = [0] * self.profile.padding(plan.row_count)
        cache = self.profile.cache(self.model_type, self.pool, plan)
        rows = transfer.indices([ids + fill, plan.positions() + fill], self._device)
        logits = self.run_on_device(cache, rows[:1], rows[1:], kept_rows(wanted, rows.shape[1], self._device))
        cache.finish(self.pool.layout.layers)
        features = self.taps.take()
        if features is not None and fill:
            features = features[:, : plan.row_count]
        digester = self.digester if wanted else None
        digests = None if digester is None or asks is None else digester.answer(logits, asks)
        return Computed(logits, features, digests)

    def run_on_device(
        self, cache: PackedCache, ids: torch.Tensor, positions: torch.Tensor, kept: int | torch.Tensor
    ) -> torch.Tensor:
        """Runs the model's own forward over ``[1, rows]`` ids; logits of the ``kept`` rows, where it ran.

        ``kept`` are the row indices wanted, or a number of last rows. Logits are in the model's dtype.
        """
        extra = {"logits_to_keep": kept} if self._keeps_logits else {}
        ACTIVE.cache = cache
        try:
            output = self.model(
                input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True, **extra
            )
        finally:
            ACTIVE.cache = None
        logits: torch.Tensor = output.logits[0]
        if not self._keeps_logits:
            logits = logits[-kept:] if isinstance(kept, int) else logits[kept]
        return logits

    def find_layout(self) -> ModelShape:
        """Cache layout, logit width and windows of the model, found by sending one row through it."""
        layers = self.model.config.get_text_config().num_hidden_layers
        return find_layout(self.run_on_device, self.model_type, self._device, layers)

    def _pool_layout(self, found: KVLayout, guest: GuestRoom | None) -> KVLayout:
        """The pool's layout for a model that caches as ``found``, with room for the guest if there is one."""
        layout = self.profile.layout(found)
        width = self.model.config.get_text_config().hidden_size
        return layout if guest is None else layout.with_guest(guest, width)
