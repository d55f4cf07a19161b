"""The settings of a retrieval process; see `outrider.runtime.settings` for where they come from."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field, SecretStr

from outrider.runtime.settings import CacheDir, Names, WorkerSettings, default_cache_dir
from retrieval_service.ranking import DraftShape

DEFAULT = DraftShape()


class RetrievalSettings(WorkerSettings):
    """Flags of `outrider serve retrieval`, variables OUTRIDER_RETRIEVAL__FIELD."""

    role: ClassVar[str] = "retrieval"

    tokenizer: str = ""
    """The target's tokenizer: a tokenizer.json, a folder that has one, or a Hugging Face id. Without it there
    are no corpora of text, and past outputs are kept for sessions of any tokenizer."""
    corpus: Names = ()
    """Folders of corpora to draft from, as `outrider index build` makes them, separated by commas."""
    folder: str = ""
    """Folder for corpora that are built over the wire, past outputs and documents; without it past outputs
    and documents are kept in memory alone."""
    embeddings: str = ""
    """Folder of a model whose embedding table finds documents near to a session; without it, or
    `embeddings_url`, there are no documents."""
    embeddings_url: SecretStr | None = None
    """A server of OpenAI's embeddings that finds documents in place of `embeddings`: its base URL, such as
    http://host:8080/v1. While the server does not answer, sessions find no new documents. Secret, as a URL
    may hold a password, though one that does is refused."""
    embeddings_model: str = ""
    """The model to ask that server for; empty: requests name none."""
    embeddings_key: SecretStr | None = None
    """The key for that server. Default: none."""
    embeddings_deadline_s: Annotated[float, Field(gt=0, le=600)] = 10.0
    """Most seconds of one request to that server, of up to 64 texts."""
    document_tokens: Annotated[int, Field(ge=1024)] = 16_000_000
    """Most tokens of documents, of all tenants together; each takes about 30 bytes of memory."""
    document_tokens_of_tenant: Annotated[int, Field(ge=1024)] = 4_000_000
    """Most tokens of documents of one tenant; more are refused."""
    past: bool = True
    """Whether drafts come from past outputs too."""
    past_tokens: Annotated[int, Field(ge=1024)] = 16_000_000
    """Most tokens of past output, of all tenants together; the tenant with the most loses its oldest."""
    past_tokens_of_tenant: Annotated[int, Field(ge=1024, lt=2**28)] = 2_000_000
    """Most tokens of past output of one tenant; its oldest go first."""
    cache_dir: CacheDir = Field(default_factory=default_cache_dir)
    """Folder that keeps the compiled index of past outputs for later starts; none: nothing is kept. Default:
    outrider in the user's cache folder."""
    nodes: Annotated[int, Field(ge=1, le=255)] = DEFAULT.nodes
    """Most nodes of one draft."""
    depth: Annotated[int, Field(ge=1, le=255)] = DEFAULT.depth
    """How many tokens ahead of the last committed one a draft reaches."""
    floor: Annotated[float, Field(ge=0, le=1)] = DEFAULT.floor
    """Nodes less likely than this to be accepted are not sent."""
    max_sessions: Annotated[int, Field(ge=1)] = 4096
    """Most sessions followed at a time."""
    max_length: Annotated[int, Field(ge=1)] = 1 << 20
    """Longest session that is followed, in tokens."""
    keep_s: Annotated[float, Field(ge=0)] = 10.0
    """How long a session is remembered after its stream broke, in seconds."""
    ingest_mb: Annotated[int, Field(ge=1)] = 4096
    """Most text that all builds over the wire of one tenant may bring at once, in MiB."""
    corpora_mb_of_tenant: Annotated[int, Field(ge=1)] = 16_384
    """Most room on the disk, in MiB, for all corpora of one tenant that are built over the wire, and as much
    for the public ones; a build that would take more is refused."""

    @property
    def shape(self) -> DraftShape:
        """Bounds of drafts, as `ranking` takes them."""
        return DraftShape(nodes=self.nodes, depth=self.depth, floor=self.floor)

    def incomplete(self) -> Iterator[str]:
        """Says which settings of an embeddings server are given without the server's URL."""
        told = {
            "embeddings_model": bool(self.embeddings_model),
            "embeddings_key": bool(self.embeddings_key),
            "embeddings_deadline_s": "embeddings_deadline_s" in self.model_fields_set,
        }
        given = [name for name in told if told[name]]
        if given and not self.embeddings_url:
            yield (
                f"{given[0]} is given without embeddings_url: give embeddings_url too, or leave "
                f"{' and '.join(given)} out"
            )

    def below(self, name: str) -> Path | None:
        """A folder of this name below `folder`; None if `folder` is not set."""
        return Path(self.folder).expanduser() / name if self.folder else None
