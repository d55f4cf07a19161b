"""The settings of a verifier process; see `outrider.runtime.settings` for where they are read from."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from outrider.model_settings import LearningSettings
from outrider.runtime.settings import CacheDir, Names, default_cache_dir
from outrider.runtime.threads import Threads
from outrider.wire.names import checked_source_name
from speculative.errors import InvalidRequest
from speculative.policies.names import checked_policy
from verifier_service.proposers import BATCHED_PROPOSERS, LEAF_PROPOSERS
from verifier_service.sessions.request import MAX_NODES


def named_head(text: str) -> tuple[str, str]:
    """Splits NAME=CHECKPOINT, or CHECKPOINT alone, into name and checkpoint; the name may be empty.

    An = behind a slash is part of the checkpoint's path.
    """
    name, equals, checkpoint = text.partition("=")
    return (name, checkpoint) if equals and "/" not in name else ("", text)


class VerifierSettings(LearningSettings):
    """Flags of `outrider serve verifier`, variables OUTRIDER_VERIFIER__FIELD."""

    role: ClassVar[str] = "verifier"

    model_name: Annotated[str, Field(max_length=256)] = ""
    """The target's name in requests; by default the folder's name or the id."""
    deterministic: bool = False
    """Whether each row of logits depends bit for bit on weights and tokens alone, whatever else the pass
    computes; uses one thread."""
    threads: Threads = "auto"
    """Threads that compute a pass on the CPU. auto: a measurement chooses as few as are fast; for eager
    passes at most all cores but one, or OMP_NUM_THREADS."""
    cache_dir: CacheDir = Field(default_factory=default_cache_dir)
    """Folder that keeps compiled passes and times measured at load for later starts; none: nothing is kept.
    Default: outrider in the user's cache folder."""
    passes: Literal["auto", "eager", "compiled"] = "auto"
    """How passes of the target, its heads and the small model run on the CPU in float32: eager; compiled,
    which waits for the C++ compiler before serving; auto, which serves eagerly until compiled passes are
    ready. On a GPU, auto and compiled compile the model's layers at load, which takes half a minute, and keep
    the compiled layers unless steps get slower."""
    kv_dtype: Literal["auto", "int8"] = "auto"
    """The number format of the target's keys and values: that of its passes (auto), or int8 with a scale for
    each token and head, in which up to 3.9 times as many tokens fit as in float32, and up to 1.9 times as
    many as in bfloat16. Int8 takes a target that verifies trees."""
    ranks: Annotated[int, Field(ge=1, le=64)] = 1
    """Processes on this machine over which the target is split, each with a device of its own; torchrun can
    start them instead."""
    ranks_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 30.0
    """How long one rank may keep the others waiting before all ranks end, in seconds."""
    max_sessions: Annotated[int, Field(ge=1)] = 256
    """The most sessions that may be open at once; further ones are refused with a time to try again."""
    max_running: Annotated[int, Field(ge=1)] = 64
    """The most sessions that decode at once; other open sessions wait for their turn."""
    prefix_cache: bool = True
    """Whether the keys and values of committed tokens are kept for later sessions of the tenant that begin
    with the same tokens."""
    lease_s: Annotated[float, Field(ge=0)] = 300.0
    """How long a session can still be read after it ended or was parked, in seconds. Until then its cached
    blocks are evicted only after other blocks."""
    node_limit: Annotated[int, Field(ge=0, le=MAX_NODES)] = 16
    """The most drafted nodes of one session in one round, for requests that set no limit."""
    budget: Literal["adaptive", "fixed"] = "adaptive"
    """Which drafted nodes a step admits: those that pay for their rows (adaptive), or all within the node
    limits (fixed)."""
    policy: str = ""
    """How far sources inside the verifier draft where a request names no policy: NAME or NAME:NUMBER, as
    docs/drafter.md lists them. Empty: each source decides."""
    proposers: Names = ()
    """Further sources to offer inside the verifier: bigram, jacobi, lookahead, lookup-below (looks up what
    follows the leaves of other sources' drafts), recycling."""
    small_model: str = ""
    """Folder or id of a small model with the target's tokenizer. The model drafts inside the verifier,
    between the target's passes, as source small-model. Use it if a pass takes only a few milliseconds: the
    drafts of a drafter process then come too late."""
    amateur: str = ""
    """Folder or id of a weaker model with the target's tokenizer, for the contrastive decoding of
    requests that set contrast_strength. Its keys and values take memory beside kv_mb. Only on CPUs, on one
    rank, and beside a target that verifies trees."""
    heads: Names = ()
    """Heads that draft from the target's hidden states: folders or ids of checkpoints. NAME=CHECKPOINT names
    the source; without NAME= the source has the name of the head's kind."""
    prefill_chunk: Annotated[int, Field(ge=1)] = 512
    """The most rows of one pass, shared by prompts and decoding sessions."""
    prefill_stall_ms: Annotated[float, Field(gt=0)] = 40.0
    """How long a pass that computes part of a prompt may take while other sessions decode, in ms."""
    wait_ms_max: Annotated[float, Field(ge=0, le=1000)] = 4.0
    """How long a step with a single ready session may wait for drafts, in ms; 0: not at all."""
    source_wait_ms_max: Annotated[int, Field(ge=0, le=10_000)] = 1000
    """The longest time in ms that a session's round may wait for a remote source that asks for waiting, such
    as the client's device; 0: rounds never wait. Other sessions continue meanwhile."""
    orphan_grace_s: Annotated[float, Field(gt=0)] = 5.0
    """How long a session goes on while nobody reads it, in seconds; then it is parked."""
    switch_interval_us: Annotated[int, Field(ge=10, le=5000)] = 500
    """How long the event loop may hold the interpreter while the engine waits for it, in microseconds
    (`sys.setswitchinterval`)."""

    @model_validator(mode="after")
    def _weights_are_on_one_rank(self) -> Self:
        if self.weight_dtype != "auto" and self.ranks > 1:
            raise ValueError(
                f"weight_dtype = {self.weight_dtype} beside ranks = {self.ranks}: such weights are "
                "multiplied on one rank alone; leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _one_head_learns(self) -> Self:
        if not self.learn:
            return self
        if not self.heads:
            raise ValueError(
                f"learn = {self.learn}, and there is no head to learn: name one in heads, or leave learn out"
            )
        if len(self.heads) > 1:
            raise ValueError(
                f"learn = {self.learn} beside {len(self.heads)} heads: only one learns; name one in heads"
            )
        if self.ranks > 1:
            raise ValueError(
                f"learn = {self.learn} beside ranks = {self.ranks}: a head learns on one rank alone; "
                "leave one of them out"
            )
        return self

    @field_validator("heads")
    @classmethod
    def _named(cls, heads: tuple[str, ...]) -> tuple[str, ...]:
        for head in heads:
            name, checkpoint = named_head(head)
            if not checkpoint:
                raise ValueError(f"{head!r} has no folder or id after the =; give NAME=FOLDER or NAME=ID")
            if name:
                try:
                    checked_source_name(name)
                except InvalidRequest as error:
                    raise ValueError(str(error)) from error
        if twice := [head for head in heads if heads.count(head) > 1]:
            raise ValueError(f"{twice[0]!r} is named twice; name each head once")
        return heads

    @field_validator("policy")
    @classmethod
    def _known_policy(cls, policy: str) -> str:
        try:
            return checked_policy(policy)
        except InvalidRequest as error:
            raise ValueError(str(error)) from error

    @field_validator("proposers")
    @classmethod
    def _known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        known = sorted({*BATCHED_PROPOSERS, *LEAF_PROPOSERS})
        if unknown := [name for name in names if name not in known]:
            raise ValueError(f"{unknown[0]!r} is not a proposer of this list: {', '.join(known)}")
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"{twice[0]!r} is named twice; name each proposer once")
        return names
