"""The settings of a drafter process; see `outrider.runtime.settings` for where they come from."""

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from drafter_service.draft_tree import Growth
from outrider.model_settings import ModelSettings
from outrider.runtime.settings import CacheDir, default_cache_dir
from outrider.runtime.threads import Threads
from outrider.wire.names import checked_source_name
from speculative.errors import InvalidRequest

DRAFTERS = {"causal_lm": "drafter_service.drafters.causal_lm:CausalLMDrafter"}
"""Kinds of drafters: name in settings -> "module:class"; the class' `load` takes the service's settings."""
if TYPE_CHECKING:
    DrafterKind = str
else:
    DrafterKind = Literal[tuple(DRAFTERS)]

DEFAULT = Growth()


def _source_name(name: str) -> str:
    try:
        return checked_source_name(name)
    except InvalidRequest as error:
        raise ValueError(str(error)) from error


class DrafterSettings(ModelSettings):
    """Flags of `outrider serve drafter`, variables OUTRIDER_DRAFTER__FIELD."""

    role: ClassVar[str] = "drafter"

    name: Annotated[str, AfterValidator(_source_name)] = "drafter"
    """This source's name in usage and metrics; 1 to 64 printable characters, no comma, not `target`."""
    drafter: DrafterKind = "causal_lm"
    """The kind of drafter: an entry of drafter_service.settings.DRAFTERS."""
    threads: Threads = "auto"
    """Threads that compute a pass on the CPU. auto: a measurement at load chooses as few as are fast, at most
    all cores but one, or OMP_NUM_THREADS."""
    cache_dir: CacheDir = Field(default_factory=default_cache_dir)
    """Folder that keeps compiled passes and times measured at load for later starts; none: nothing is kept.
    Default: outrider in the user's cache folder."""
    passes: Literal["auto", "eager", "compiled"] = "eager"
    """How passes run on the CPU in float32: eager; compiled, which waits for the C++ compiler before serving;
    auto, which serves eagerly until compiled passes are ready."""
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
    nodes_per_pass: Annotated[int, Field(ge=1)] = 5
    """Nodes expanded in one pass, shared by the sessions; each gets at least one."""
    prefill_chunk: Annotated[int, Field(ge=1)] = 256
    """Most committed tokens read in one pass; the rest of a prompt waits for the next one."""

    @property
    def most_rows(self) -> int:
        """The most rows of one pass: committed tokens, and nodes of all sessions."""
        return self.prefill_chunk + max(self.nodes_per_pass, self.max_sessions)

    @property
    def growth(self) -> Growth:
        """Bounds and estimates by which draft trees grow."""
        return Growth(children=self.children, scale=self.scale, floor=self.floor, depth=self.depth)
