"""What a retrieval process can be told; see `outrider.runtime.settings` for how."""

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from outrider.runtime.settings import Names, WorkerSettings
from retrieval_service.ranking import Shape

DEFAULT = Shape()


class RetrievalSettings(WorkerSettings):
    """Flags of `outrider serve retrieval`, variables OUTRIDER_RETRIEVAL__FIELD."""

    role: ClassVar[str] = "retrieval"

    tokenizer: str = ""
    """The target's tokenizer: a tokenizer.json, a folder that has one, or a Hugging Face id. Without it there
    are no corpora of text, and past outputs are of whatever ids come."""
    corpus: Names = ()
    """Folders of corpora to draft from, as `outrider index build` makes them, separated by commas."""
    folder: str = ""
    """Where corpora that are built over the wire, past outputs and references are kept; without it past
    outputs and references are in memory alone."""
    embeddings: str = ""
    """A model's folder whose embedding table finds references that are near; without it, or an `encoder`,
    there are none."""
    encoder: str = ""
    """A model of sentence-transformers, name or folder, that finds them in place of `embeddings`. It runs in
    a process of its own, which needs the extra `embed`."""
    reference_tokens: Annotated[int, Field(ge=1024)] = 16_000_000
    """Ids of references that are taken on, of all tenants together; each takes about 30 bytes of memory."""
    reference_tokens_of_tenant: Annotated[int, Field(ge=1024)] = 4_000_000
    """Of one tenant; more are refused."""
    past: bool = True
    """Whether drafts come from past outputs too."""
    past_tokens: Annotated[int, Field(ge=1024)] = 16_000_000
    """Ids of past output that are held, of all tenants together; whoever has most loses its oldest."""
    past_tokens_of_tenant: Annotated[int, Field(ge=1024, lt=2**28)] = 2_000_000
    """Of one tenant; its oldest go first."""
    nodes: Annotated[int, Field(ge=1, le=255)] = DEFAULT.nodes
    """The most nodes of one draft."""
    depth: Annotated[int, Field(ge=1, le=255)] = DEFAULT.depth
    """How many ids ahead of the last committed one it drafts."""
    floor: Annotated[float, Field(ge=0, le=1)] = DEFAULT.floor
    """A node less likely than this to be accepted is not sent."""
    max_sessions: Annotated[int, Field(ge=1)] = 4096
    """Sessions followed at a time."""
    max_length: Annotated[int, Field(ge=1)] = 1 << 20
    """The most ids of a session that it follows."""
    keep_s: Annotated[float, Field(ge=0)] = 10.0
    """How long a session is remembered after its stream broke, in seconds."""
    ingest_mb: Annotated[int, Field(ge=1)] = 4096
    """The most text that one build over the wire may bring, in MiB."""

    @property
    def shape(self) -> Shape:
        """What drafts look like."""
        return Shape(nodes=self.nodes, depth=self.depth, floor=self.floor)

    def below(self, name: str) -> Path | None:
        """A folder below `folder`; None where there is none."""
        return Path(self.folder).expanduser() / name if self.folder else None
