"""The settings of a drafter process; see `outrider.runtime.settings` for where they come from."""

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from drafter_service.draft_tree import Growth
from outrider.model_settings import LearningSettings
from outrider.runtime.settings import CacheDir, Names, NumberedNames, default_cache_dir
from outrider.runtime.threads import Threads
from outrider.skip_set import read_skips
from outrider.wire.names import checked_source_name
from speculative.errors import InvalidRequest
from speculative.policies.names import DEFAULT_POLICY, policy_choice

DRAFTERS = {
    "block": "drafter_service.drafters.block:BlockDrafter",
    "causal_lm": "drafter_service.drafters.causal_lm:CausalLMDrafter",
    "ngram": "drafter_service.drafters.ngram:NgramDrafter",
}
"""Kinds of drafters: name in settings -> "module:class"; the class' `load` takes the service's settings."""
if TYPE_CHECKING:
    DrafterKind = str
else:
    DrafterKind = Literal[tuple(DRAFTERS)]

DEFAULT = Growth()


def _policy(text: str) -> str:
    try:
        policy_choice(text)
    except InvalidRequest as error:
        raise ValueError(str(error)) from error
    return text


def _source_name(name: str) -> str:
    try:
        return checked_source_name(name)
    except InvalidRequest as error:
        raise ValueError(str(error)) from error


def _skips(items: tuple[str, ...]) -> tuple[str, ...]:
    try:
        read_skips(items)
    except InvalidRequest as error:
        raise ValueError(str(error)) from error
    return items


class DrafterSettings(LearningSettings):
    """Flags of `outrider serve drafter`, variables OUTRIDER_DRAFTER__FIELD."""

    role: ClassVar[str] = "drafter"

    name: Annotated[str, AfterValidator(_source_name)] = "drafter"
    """This source's name in usage and metrics; 1 to 64 printable characters, no comma, not `target`."""
    drafter: DrafterKind = "causal_lm"
    """The kind of drafter: causal_lm, which computes one token after the other; block, which writes several
    in one pass with a model that `outrider distil --kind block` made; ngram, which counts texts and needs no
    model but the tokenizer of --model."""
    ngram_text: Names = ()
    """With drafter=ngram: text files to count, separated by commas. The drafter may draft their contents
    for every tenant."""
    ngram_mb: Annotated[int, Field(ge=1)] = 64
    """With drafter=ngram: memory of the counts, in MiB; the rarest n-grams are left out."""
    skip: Annotated[NumberedNames, AfterValidator(_skips)] = ()
    """Layers of the model to skip, by number from 0, and sublayers: 3,5.attention,7.mlp. With the target as
    the model, the target drafts for itself with all else. `outrider models skip` finds what to skip."""
    exit_layer: Annotated[int, Field(ge=0)] = 0
    """Number of leading layers to run before the last norm and the output layer; 0: all layers."""
    threads: Threads = "auto"
    """Threads that compute a pass on the CPU. auto: a measurement chooses as few as are fast; for eager
    passes at most all cores but one, or OMP_NUM_THREADS."""
    cache_dir: CacheDir = Field(default_factory=default_cache_dir)
    """Folder that keeps compiled passes and times measured at load for later starts; none: nothing is kept.
    Default: outrider in the user's cache folder."""
    passes: Literal["auto", "eager", "compiled"] = "auto"
    """How passes run on the CPU in float32: eager; compiled, which waits for the C++ compiler before serving;
    auto, which serves eagerly until compiled passes are ready. On a GPU, auto and compiled compile the
    layers at load, which takes half a minute, and keep the compiled layers unless steps get slower."""
    max_sessions: Annotated[int, Field(ge=1)] = 256
    """Most sessions followed at a time."""
    keep_s: Annotated[float, Field(ge=0)] = 10.0
    """How long a session's keys and values outlive a broken stream, in seconds."""
    children: Annotated[int, Field(ge=1, le=255)] = DEFAULT.children
    """Most children of one node."""
    depth: Annotated[int, Field(ge=1)] = DEFAULT.depth
    """How many tokens ahead of the last committed one the drafter drafts."""
    floor: Annotated[float, Field(ge=0, le=1)] = DEFAULT.floor
    """Nodes less likely than this to be accepted are neither sent nor expanded."""
    scale: Annotated[float, Field(gt=0)] = DEFAULT.scale
    """Standard deviation of the target's logits from the drafter's: a larger number trusts each draft
    less."""
    policy: Annotated[str, AfterValidator(_policy)] = DEFAULT_POLICY
    """How far drafts go where a request names no policy: NAME or NAME:NUMBER. docs/drafter.md lists the
    names."""
    cascade: Annotated[int, Field(ge=0, le=16)] = DEFAULT.cascade
    """Tokens that a lookup in the session's own text guesses below a leaf. The pass that expands the leaf
    computes them as well, and the drafter keeps those that it would have drafted."""
    nodes_per_pass: Annotated[int, Field(ge=1)] = 5
    """Nodes expanded in one pass, shared by the sessions; each gets at least one."""
    prefill_chunk: Annotated[int, Field(ge=1)] = 256
    """Most committed tokens read in one pass; the rest of a prompt waits for the next one."""

    @model_validator(mode="after")
    def _has_weights(self) -> Self:
        if self.weight_dtype != "auto" and self.drafter == "ngram":
            raise ValueError(
                f"weight_dtype = {self.weight_dtype} beside drafter = ngram: counts have no weights; leave "
                "weight_dtype out"
            )
        return self

    @model_validator(mode="after")
    def _is_of_its_kind(self) -> Self:
        if self.ngram_text and self.drafter != "ngram":
            raise ValueError(
                f"ngram_text is only for drafter = ngram, but drafter is {self.drafter}: set drafter = "
                "ngram, or leave ngram_text out"
            )
        if self.drafter == "ngram" and (self.skip or self.exit_layer):
            name = "skip" if self.skip else "exit_layer"
            raise ValueError(
                f"{name} cannot be used with drafter = ngram, which has no layers; leave {name} out"
            )
        return self

    @property
    def most_rows(self) -> int:
        """The most rows of one pass: committed tokens, and nodes of all sessions."""
        expanded = max(self.nodes_per_pass, self.max_sessions)
        return self.prefill_chunk + expanded + self.cascade * self.max_sessions

    @property
    def growth(self) -> Growth:
        """Bounds and estimates by which draft trees grow."""
        return Growth(
            children=self.children, scale=self.scale, floor=self.floor, depth=self.depth, cascade=self.cascade
        )
