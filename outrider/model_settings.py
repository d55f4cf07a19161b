"""Settings of the services that compute with a model: where, in which numbers, and with how much memory."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from outrider.runtime.settings import CacheDir, Names, WorkerSettings


class ModelSettings(WorkerSettings):
    """Base of the settings of verifier and drafter."""

    role: ClassVar[str] = "model"

    model: str
    """The model: a Hugging Face folder or id."""
    device: str = "auto"
    """The torch device that computes, such as cpu, cuda or cuda:1; auto: cuda where there is a GPU, else cpu.
    """
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"
    """The number format to compute in; auto: the checkpoint's on a GPU, float32 on a CPU."""
    weight_dtype: Literal["auto", "bfloat16", "int8"] = "auto"
    """The number format in which linear layers keep their weights: that of the passes (auto), bfloat16, or
    int8 with a scale for each output. Passes compute in float32. bfloat16 and int8 take a CPU with AVX-512
    and g++."""
    kv_mb: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Memory for keys and values of all sessions, in MiB; auto: what is left of a GPU after the weights and a
    trial of the largest step, 1024 on a CPU."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.92
    """The share of a GPU's memory that this process may take where kv_mb is auto."""
    cuda_graphs: Literal["require", "prefer", "off"] = "require"
    """Whether a model that cannot run as CUDA graphs on a GPU is refused (require) or served several times
    slower (prefer); off: no model runs as graphs. A target split over ranks always runs without graphs."""
    capture_s: Annotated[float, Field(ge=0, le=3600)] = 120.0
    """Seconds after which sizes of steps that can be padded to others are left without a CUDA graph."""

    @model_validator(mode="after")
    def _weights_are_served(self) -> Self:
        if self.weight_dtype != "auto" and self.dtype not in ("auto", "float32"):
            raise ValueError(
                f"weight_dtype = {self.weight_dtype} beside dtype = {self.dtype}: passes over such weights "
                "compute in float32; leave one of them out"
            )
        return self


def _learn(owner: str) -> str:
    if owner in ("", "public") or owner.removeprefix("tenant:") not in ("", owner):
        return owner
    raise ValueError(f"{owner!r} is no owner of what is learnt: give public, or tenant:NAME")


class LearningSettings(ModelSettings):
    """Base of the settings of services whose weights may learn from traffic."""

    learn: Annotated[str, AfterValidator(_learn)] = ""
    """Whose sessions the weights that draft learn from: tenant:NAME (they then draft for that tenant
    alone), or public (see learn_from). Default: nobody's, and the weights stay as they are."""
    learn_from: Names = ()
    """With learn=public: tenants whose sessions are learnt from, separated by commas; * is every tenant. The
    weights draft for all tenants."""
    learn_dir: CacheDir = None
    """Folder of the learnt weights, for this process alone; with learn it must be given."""
    learn_buffer_mb: Annotated[int, Field(ge=1)] = 16
    """Memory for text to learn from and to score with, in MiB; a quarter is for scoring."""
    learn_every: Annotated[int, Field(ge=1)] = 512
    """A lesson is due after this many committed tokens that were not drafted; each lesson that fails doubles
    the number, up to 64 times this one, until one is scored."""
    learn_steps: Annotated[int, Field(ge=1)] = 60
    """Steps of training in a lesson, of 8 passages each."""
    learn_rate: Annotated[float, Field(gt=0, le=1)] = 3e-4
    """Highest learning rate of a lesson."""
    learn_memory_mb: Annotated[int, Field(ge=64)] = 2048
    """Most memory that the process of a lesson may write to, in MiB."""
    learn_cores: Annotated[int, Field(ge=1)] = 1
    """Cores that a lesson computes on. Its process has the lowest priority, and pauses while sessions run and
    fewer cores are idle."""
    learn_duty: Annotated[float, Field(gt=0, le=1)] = 0.25
    """Share of the time in which a lesson's process may run."""
