"""The aim of a build and its progress so far; reads the folder, changes nothing."""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from retrieval_service.corpus.errors import BadSource, Damaged, NoCorpus, WouldReplace
from retrieval_service.corpus.layout import (
    BUILD,
    LARGEST_VOCABULARY,
    CorpusHeader,
    ShardRecord,
    read_header,
    unsealed,
)
from retrieval_service.corpus.suffixes import LARGEST_TEXT

SHARD_TOKENS = 1 << 25
"""Ids and separators of a shard: about 400 MB to sort at two bytes an id, 700 MB at more."""


@dataclass(frozen=True, slots=True)
class CorpusSettings:
    """Settings of the corpus to build; an unfinished build continues only under the same settings."""

    tokenizer: str
    vocabulary: int
    tenant: str | None
    shard_tokens: int = SHARD_TOKENS

    def __post_init__(self) -> None:
        if not 2 <= self.shard_tokens <= LARGEST_TEXT:
            raise BadSource(f"shard tokens: {self.shard_tokens} is not within 2 and {LARGEST_TEXT}")
        if not 1 <= self.vocabulary <= LARGEST_VOCABULARY:
            raise BadSource(f"a vocabulary of {self.vocabulary} ids: not within 1 and {LARGEST_VOCABULARY}")
        if self.tenant is not None and not 1 <= len(self.tenant) <= 200:
            raise BadSource("a tenant's name has 1 to 200 characters")


@dataclass(frozen=True, slots=True)
class BuildProgress:
    """How far a build is: documents read, tokens taken, complete shards; `stage` is reading or sorting."""

    documents: int
    tokens: int
    shards: int
    stage: str


@dataclass(frozen=True, slots=True)
class Built:
    """Result of a finished build.

    Attributes:
        header: the new corpus.
        kept_shards: number of its shards that an earlier, unfinished build had left.
        left_out: number of inputs that are not part of the corpus, by reason.
        encode_seconds: spent reading and tokenizing.
        index_seconds: spent on all else: writing, sorting, syncing.
    """

    header: CorpusHeader
    kept_shards: int
    left_out: dict[str, int]
    encode_seconds: float
    index_seconds: float


@dataclass(slots=True)
class State:
    """How far an unfinished build has come, as build.json says.

    Attributes:
        name: hash of the settings and of the source's name.
        documents: number of documents that are taken completely, or left out.
        offset: number of ids of the next document that are taken already.
        read: hash of these documents, hexadecimal.
        copies: number of these documents that are left out as near-copies.
    """

    name: str
    generation: int
    documents: int = 0
    offset: int = 0
    read: str = field(default_factory=lambda: new_hash().hexdigest())
    copies: int = 0
    shards: list[ShardRecord] = field(default_factory=list)

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> Self:
        """A build's state from its `asdict` form."""
        shards = [ShardRecord.of(shard) for shard in said["shards"]]
        return cls(**{**said, "shards": shards})


def new_hash() -> "hashlib.blake2b":
    """A new hash object, by which documents are recognised."""
    return hashlib.blake2b(digest_size=32)


def name_of(settings: CorpusSettings, source: str) -> str:
    """Hash of a build's settings and source: builds of one name can continue from each other's shards."""
    said = {**asdict(settings), "source": source}
    return hashlib.blake2b(repr(sorted(said.items())).encode(), digest_size=32).hexdigest()


def source_digest(source: str) -> str:
    """Hash of a document source's name, as the header of its corpus holds it."""
    return hashlib.blake2b(source.encode(), digest_size=32).hexdigest()


def check_replaced(folder: Path, old: CorpusHeader, tenant: str | None, source: str, *, again: bool) -> None:
    """Raises WouldReplace unless the corpus is built anew from the same source for the same owner.

    Args:
        tenant: the new corpus' owner; None: everybody.
        source: the name of the new corpus' document source.
        again: whether the source can be read again. Standard input cannot, and may hold any text.
    """
    if not old.tokens:
        return
    if old.tenant == tenant and again and old.source == source_digest(source):
        return
    what = "documents from other places" if old.tenant == tenant else f"documents of {old.owner}"
    raise WouldReplace(
        f"{folder}: holds a corpus of {old.tokens:,} tokens in {old.documents:,} {what}, "
        "which this one would replace: choose another folder, or say --replace"
    )


def old_header(folder: Path) -> CorpusHeader | None:
    """Header of the corpus that is to be replaced; None where there is no corpus. Raises Damaged."""
    try:
        return read_header(folder)
    except NoCorpus:
        return None
    except Damaged as error:
        raise Damaged(f"{error}; remove the corpus first, as its files are not known") from error


def unfinished(folder: Path) -> State | None:
    """State of the unfinished build in a folder; None without one, or where a complete shard is missing."""
    try:
        state = State.of(unsealed(folder / BUILD))
    except (OSError, Damaged, TypeError, KeyError):
        return None
    files = [file for shard in state.shards for file in shard.files]
    there = all(
        (path := folder / file.name).is_file() and path.stat().st_size == file.bytes for file in files
    )
    return state if there else None
