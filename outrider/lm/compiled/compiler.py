"""Has a model's passes compiled beside its serving, and hands the compiled ones over between two passes.

Serving begins eagerly. A thread looks the package up in the cache or has a child compile it, loads it, checks
it against the model's own eager forward on a pool of its own, and leaves it for the thread that runs passes
to take up. Whatever goes wrong leaves the passes eager, and one warning says why.
"""

import json
import logging
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from transformers import PreTrainedConfig

from outrider.compiling.store import CompileFailed, NeverCompiled, PackageStore
from outrider.compiling.toolchain import find_compiler
from outrider.lm.autotune.threads import PassThreads, measure_helpers
from outrider.lm.compiled.building import build
from outrider.lm.compiled.order import CompileOrder
from outrider.lm.compiled.package import CompiledRunner, PassPackage, panel_width
from outrider.lm.compiled.panels import constants_of, inlined, own_constants
from outrider.lm.compiled.row_kernel import use_row_kernel
from outrider.lm.kv.blocks import BLOCK
from outrider.lm.kv.pool import KVLayout, SlotPool
from outrider.lm.kv.table import SlotTable
from outrider.lm.linear import PackedLinear
from outrider.lm.load.part import ModelPart
from outrider.lm.outcome import HostOutcome
from outrider.lm.plan import PassPlan, SequenceRows
from outrider.lm.step_profile import profile_steps
from outrider.skip_set import write_skips
from speculative.errors import ModelRefused

if TYPE_CHECKING:
    from outrider.lm.load.check import Trial
    from outrider.lm.runner import PackedLM

log = logging.getLogger(__name__)

Passes = Literal["auto", "eager", "compiled"]
"""How a model's passes run: eagerly, compiled, or eagerly until compiled ones are ready."""

_MOST_BYTES = 4 * 2**30
"""Largest weights of linear layers that are kept twice, for eager and for compiled passes, in bytes."""

_FOLDER = "passes"
_STOPPED = "it was stopped"
_GAIN = "; compiled passes of few rows take a fifth to a quarter of the time"


class PassCompiler:
    """Compiles one model's passes in a thread of its own.

    Args:
        lm: the model; its settings that shape a pass (`PackedLM.wants`) must not change any more.
        trial: random sessions with the logits of the model's own forward, which a package has to give.
        cache_dir: folder that keeps packages for later processes; None: compile for this process alone.
    """

    def __init__(self, lm: "PackedLM", trial: "Trial", cache_dir: Path | None) -> None:
        self.seconds = 0.0
        """How long it took until compiled passes were ready, in seconds."""
        self.failure = ""
        """Why passes stay eager; empty while compiling goes on and once passes are compiled."""
        self._lm = lm
        self._trial = trial
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        if cache_dir is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="outrider-passes-")
            cache_dir = Path(self._temporary.name)
        self._cache_dir = cache_dir
        self._store = PackageStore(cache_dir / _FOLDER)
        self._ready: CompiledRunner | None = None
        self._stop = threading.Event()
        self._done = threading.Event()
        self._searched = threading.Event()
        self._thread = threading.Thread(target=self._work, name="compile passes", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def wait(self, for_child: bool) -> None:
        """Waits until compiled passes are ready or cannot be had.

        Unless ``for_child``, the wait also ends where only a child could still compile them. `close`, called
        from another thread, ends the wait too.
        """
        (self._done if for_child else self._searched).wait()

    @property
    def is_done(self) -> bool:
        """Whether compiled passes are ready or cannot be had."""
        return self._done.is_set()

    def take(self) -> CompiledRunner | None:
        """Hands the runner of compiled passes over, once; None where there is none to hand over.

        For the thread that runs the model's passes.
        """
        ready, self._ready = self._ready, None
        return ready

    def close(self) -> None:
        """Ends compiling and every `wait`; blocks until the child is gone."""
        self._stop.set()
        if not self._done.is_set():
            self.failure = _STOPPED
        self._searched.set()
        self._done.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._temporary is not None:
            self._temporary.cleanup()

    def _work(self) -> None:
        began = time.perf_counter()
        try:
            self._use_kernel(compiles=False)
            self._ready = self._compiled()
        except CompileFailed as error:
            self._give_up(str(error), isinstance(error, NeverCompiled))
        except Exception as error:
            # Loaders and compilers raise errors of no common class; eager passes need neither.
            self._give_up(f"{type(error).__name__}: {error}")
        else:
            self.seconds = time.perf_counter() - began
            fields = {"model_type": self._lm.model_type, "seconds": round(self.seconds, 1)}
            log.info("passes are compiled", extra={"fields": fields})
        finally:
            self._searched.set()
            self._use_kernel()
            self._done.set()

    def _use_kernel(self, compiles: bool = True) -> None:
        """Has the process use the kernel of sampled tokens; unless ``compiles``, only one from the cache."""
        if self._lm.model.device.type == "cpu" and not self._stop.is_set():
            use_row_kernel(self._cache_dir, self._stop.is_set, compiles)

    def _give_up(self, why: str, never: bool = False) -> None:
        self.failure = why.splitlines()[0]
        if not self._stop.is_set():
            level, gain = (logging.INFO, "") if never else (logging.WARNING, _GAIN)
            log.log(level, "passes of %s stay eager: %s%s", self._lm.model_type, self.failure, gain)

    def _compiled(self) -> CompiledRunner:
        """The runner of compiled passes, checked. Raises CompileFailed."""
        lm = self._lm
        self._require_open()
        check_compilable(lm)
        compiler = find_compiler()
        if compiler is None:
            raise CompileFailed("there is no C++ compiler (g++) on the PATH; install one")
        config, part = lm.part_of or (lm.model.config, ModelPart())
        small = inlined(own_constants(lm.model))
        added = lm.known_ids - lm.vocabulary_size
        order = CompileOrder(
            _json_of(config),
            tuple(lm.wants.features),
            compiler,
            small,
            added,
            lm.profile.weight_dtype,
            write_skips(part.skip),
            part.first,
        )
        if (found := self._store.find(order.key)) is not None:
            try:
                return self._loaded(found)
            except Exception as error:
                self._require_open()
                log.warning("a compiled package in the cache is broken and is compiled anew: %s", error)
                self._store.remove(order.key)
        self._searched.set()
        self._use_kernel()  # takes a second, where the package takes a minute
        return self._loaded(build(order, self._store, self._stop.is_set))

    def _loaded(self, folder: Path) -> CompiledRunner:
        self._require_open()
        constants = constants_of(self._lm.model, panel_width(folder))
        self._require_open()
        package, layout = PassPackage(folder, constants), self._lm.pool.layout
        try:
            # The trial's logits are those of the model's own forward, which knows no int8.
            floats = replace(layout, int8=False)
            self._trial.verify(_PackagedLM(self._lm, package, floats, self._require_open))
        except ModelRefused as error:
            raise CompileFailed(f"compiled passes are wrong: {error}") from error
        measured = _PackagedLM(self._lm, package, layout, self._require_open)
        runner = CompiledRunner(package, self._lm.pool)
        runner.threads = measure_helpers(measured, self._lm.most_helped)
        runner.profile = profile_steps(measured)
        return runner

    def _require_open(self) -> None:
        """Raises CompileFailed once the compiler is closed; called between two stages of loading."""
        if self._stop.is_set():
            raise CompileFailed(_STOPPED)


def check_compilable(lm: "PackedLM") -> None:
    """Raises NeverCompiled for a model whose passes are not compiled, naming the reason."""
    if not lm.profile.compiles:
        raise NeverCompiled(f"passes of the {lm.profile.label.split()[0]} profile are never compiled")
    if lm.model.device.type != "cpu":
        raise NeverCompiled(f"passes are compiled on the CPU alone, not on {lm.model.device.type}")
    if lm.model.dtype is not torch.float32:
        dtype = str(lm.model.dtype).removeprefix("torch.")
        raise NeverCompiled(f"passes are compiled in float32 alone, not in {dtype}")
    layers = [module for module in lm.model.modules() if isinstance(module, PackedLinear)]
    if not layers:
        raise NeverCompiled("its linear layers are not packed")
    size = sum(4 * layer.in_features * layer.out_features for layer in layers)
    if size > _MOST_BYTES and lm.profile.weight_dtype == "auto":  # other weights are kept once
        raise NeverCompiled(
            f"its linear layers of {size >> 20} MiB would be kept twice; {_MOST_BYTES >> 20} MiB is the most"
        )


class _PackagedLM:
    """A package as it is checked and profiled: passes over a pool of its own, beside a serving model."""

    def __init__(
        self, lm: "PackedLM", package: PassPackage, layout: KVLayout, require_open: Callable[[], None]
    ) -> None:
        self.model = lm.model
        self.model_type = lm.model_type
        self.forward_calls = 0
        self.rows = 0
        self.max_length = lm.max_length
        self.pool = SlotPool(layout, max_slots=64 * lm.max_length, initial_slots=BLOCK)
        self._runner = CompiledRunner(package, self.pool)
        self._require_open = require_open

    def use_threads(self, threads: PassThreads) -> None:
        """Has these threads compute the passes from now on."""
        self._runner.threads = threads

    @property
    def passes(self) -> str:
        """``compiled``."""
        return "compiled"

    def table(self) -> SlotTable:
        """A slot table for a new session."""
        return SlotTable(self.pool)

    def release(self, table: SlotTable) -> None:
        """Returns a session's slots."""
        table.close()

    @torch.inference_mode()
    def forward(self, sequences: Sequence[SequenceRows]) -> HostOutcome:
        """One compiled pass; see `PackedLM.forward`. Raises CompileFailed once the compiler is closed."""
        self._require_open()
        plan = PassPlan(sequences, self.pool, torch.float32)
        computed = self._runner.forward(plan, plan.ids(sequences), plan.wanted(sequences))
        plan.keep_nodes()
        return HostOutcome(computed.logits)


def _json_of(config: PreTrainedConfig) -> str:
    """A model's configuration as JSON, without the folder that it came from."""
    fields = json.loads(config.to_json_string(use_diff=False))
    fields.pop("_name_or_path", None)
    return json.dumps(fields, sort_keys=True)
