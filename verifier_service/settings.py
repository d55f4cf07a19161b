"""What a verifier process can be told; see `outrider.runtime.settings` for how."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from outrider.runtime.settings import WorkerSettings
from outrider.runtime.threads import default_threads
from verifier_service.request import MAX_NODES


class VerifierSettings(WorkerSettings):
    """Flags of `outrider serve verifier`, variables OUTRIDER_VERIFIER__FIELD."""

    role: ClassVar[str] = "verifier"

    model: str
    """The target: a Hugging Face folder or id."""
    model_name: Annotated[str, Field(max_length=256)] = ""
    """What requests call it; by default the folder's name or the id."""
    device: str = "cpu"
    """The torch device."""
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    """What it computes in."""
    deterministic: bool = False
    """Whether a row of logits is bit for bit a function of weights and ids, whatever shares its pass; on one
    thread."""
    threads: Annotated[int, Field(ge=1, le=1024)] = Field(default_factory=default_threads)
    """Threads of one pass on the CPU; by default all cores but one."""
    kv_mb: Annotated[int, Field(ge=1)] = 1024
    """The most memory for keys and values of all sessions, in MiB."""
    ranks: Annotated[int, Field(ge=1, le=64)] = 1
    """Processes on this machine, each with a part of the target on a device of its own; or use torchrun."""
    ranks_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 30.0
    """How long one of several ranks may keep the others waiting before all end, in seconds."""
    max_sessions: Annotated[int, Field(ge=1)] = 256
    """Sessions that can be open at once; more are told to come back later."""
    max_running: Annotated[int, Field(ge=1)] = 64
    """Sessions that decode at once; others that are open wait for their turn."""
    prefix_cache: bool = True
    """Whether keys and values of committed ids are kept for sessions of the same tenant that begin alike."""
    lease_s: Annotated[float, Field(ge=0)] = 300.0
    """How long a session that ended or was parked is kept, its blocks evicted after others, in seconds."""
    node_limit: Annotated[int, Field(ge=0, le=MAX_NODES)] = 16
    """Drafted nodes of one session in one round, where the request does not say."""
    budget: Literal["adaptive", "fixed"] = "adaptive"
    """Whether a step admits the drafted nodes that pay for their rows, or all that fit the node limits."""
    prefill_chunk: Annotated[int, Field(ge=1)] = 512
    """The most rows of one pass that prompts share with decoding."""
    prefill_stall_ms: Annotated[float, Field(gt=0)] = 60.0
    """How long a pass with part of a prompt may take while other sessions decode, in ms."""
    wait_ms_max: Annotated[float, Field(ge=0, le=1000)] = 4.0
    """The longest that a step with one ready session waits for drafts, in ms; 0: never."""
    orphan_grace_s: Annotated[float, Field(gt=0)] = 5.0
    """How long a session that nobody reads goes on until it is parked, in seconds."""
    switch_interval_us: Annotated[int, Field(ge=10, le=5000)] = 500
    """How long the event loop may hold the interpreter while the engine wants it, in microseconds."""
