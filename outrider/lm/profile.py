"""How a model's passes are laid out and computed: what a `PackedLM` leaves to the profile it was made with.

The fast profile below is the default. `outrider.lm.deterministic.profile` is the other one; it gives up speed
so that a row of logits is the same, bit for bit, whatever else its pass computes.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from transformers import PreTrainedModel

from outrider.lm.attention.interface import SlotCache
from outrider.lm.autotune.products import TunedProducts
from outrider.lm.autotune.times_file import TimesFile
from outrider.lm.device.stacked import can_stack, stacked_on_gpu
from outrider.lm.graphs.backend_choice import choose_backend
from outrider.lm.graphs.capture import CudaGraphs
from outrider.lm.graphs.layer_compiler import compile_layers
from outrider.lm.kv.pool import KVLayout, SlotPool
from outrider.lm.linear import can_pack, pack_linears
from outrider.lm.norm import fuse_norms
from outrider.lm.plan import PassPlan
from outrider.lm.weight_only.packing import WeightDtype

if TYPE_CHECKING:
    from outrider.lm.load.check import Trial
    from outrider.lm.runner import PackedLM


class Profile(Protocol):
    """What a profile decides about one model. Each `PackedLM` has a profile of its own."""

    @property
    def label(self) -> str:
        """Name of the profile's arithmetic, for `PackedLM.numerics`; empty for the default."""
        ...

    @property
    def weight_dtype(self) -> WeightDtype:
        """Number format in which linear layers keep their weights; ``auto`` is that of the passes."""
        ...

    @property
    def compiles(self) -> bool:
        """Whether passes may be compiled."""
        ...

    def check_settings(self, device: str, threads: int, ranks: int) -> None:
        """Raises InvalidRequest for a device, a thread count or a rank count that the profile excludes."""
        ...

    def prepare(self, model: PreTrainedModel) -> None:
        """Makes of a loaded model the one that is checked and served. Raises InvalidRequest."""
        ...

    def layout(self, found: KVLayout) -> KVLayout:
        """The layout of the KV pool for a model whose own keys and values are laid out as ``found``."""
        ...

    def can_pack(self, model: PreTrainedModel, ranks: int) -> bool:
        """Whether `pack` applies to a model that is split over ``ranks`` ranks."""
        ...

    def pack(self, lm: "PackedLM") -> None:
        """Replaces the model's linear layers by packed ones. Raises ModelRefused."""
        ...

    def settle(self, lm: "PackedLM", trial: "Trial | None", ranks: int) -> None:
        """Last step of loading: checks, or chooses, how passes run. Raises ModelRefused."""
        ...

    def padding(self, row_count: int) -> int:
        """Number of rows that fill up a pass of ``row_count`` rows."""
        ...

    def cache(self, model_type: str, pool: SlotPool, plan: PassPlan) -> SlotCache:
        """The KV cache that the model sees during the pass of ``plan``."""
        ...


@dataclass(frozen=True, slots=True)
class FastProfile:
    """The fastest passes that are right up to rounding. A Profile."""

    cache_dir: Path | None = None
    """Folder that keeps measured times of kernels for later processes; None: they stay in this process."""
    weight_dtype: WeightDtype = "auto"
    """Number format in which linear layers keep their weights."""

    @property
    def label(self) -> str:
        """Empty: this is the default arithmetic."""
        return ""

    @property
    def compiles(self) -> bool:
        """True."""
        return True

    def check_settings(self, device: str, threads: int, ranks: int) -> None:
        """Accepts every device, thread count and rank count."""

    def prepare(self, model: PreTrainedModel) -> None:
        """Leaves the model as it is."""

    def layout(self, found: KVLayout) -> KVLayout:
        """The model's own layout: keys and values stay in the model's dtype."""
        return found

    def can_pack(self, model: PreTrainedModel, ranks: int) -> bool:
        """Whether `pack` applies: not over ranks, as tensor parallelism hooks the layers that it replaces."""
        return ranks == 1 and (can_pack(model) or can_stack(model))

    def pack(self, lm: "PackedLM") -> None:
        """Fuses norms and stacks layers with one input; on the CPU, chooses kernels by measuring."""
        if lm.model.device.type == "cuda":
            fuse_norms(lm.model, to_the_bit=False)
            pack_linears(lm.model, lm.find_layout, stacked_on_gpu)
        else:
            fuse_norms(lm.model)
            pack_linears(lm.model, lm.find_layout, TunedProducts(TimesFile(self.cache_dir)))

    def settle(self, lm: "PackedLM", trial: "Trial | None", ranks: int) -> None:
        """Chooses between ragged passes and static steps, as ``cuda_graphs`` says; compiles their layers."""
        if ranks == 1:  # other ranks replay ragged passes alone
            choose_backend(lm, trial)
        if lm.steps is not None and lm.steps.are_graphs and lm.gpu.compile_layers:
            compile_layers(lm, trial, "triton", CudaGraphs)

    def padding(self, row_count: int) -> int:
        """0: passes are not filled up."""
        return 0

    def cache(self, model_type: str, pool: SlotPool, plan: PassPlan) -> SlotCache:
        """The KV cache that the model sees during the pass of ``plan``."""
        return SlotCache(model_type, pool, plan)
