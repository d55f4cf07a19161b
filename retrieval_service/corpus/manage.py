"""Describes, verifies, merges and removes corpora that are built."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from retrieval_service.corpus.build import build
from retrieval_service.corpus.disk import Disk
from retrieval_service.corpus.encoding import StoredDocuments
from retrieval_service.corpus.errors import BadSource, CorpusError, Damaged, NoCorpus, WrongTokenizer
from retrieval_service.corpus.layout import HEADER, LOCK, CorpusHeader, FileRecord, is_ours, read_header
from retrieval_service.corpus.lock import held
from retrieval_service.corpus.plan import (
    SHARD_TOKENS,
    BuildProgress,
    Built,
    CorpusSettings,
    State,
    unfinished,
)

READ_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Description:
    """The corpus at a path, and the unfinished build there, which is to replace it; either may be missing."""

    header: CorpusHeader | None
    unfinished: State | None


def describe(folder: Path) -> Description:
    """Describes the corpus at a path. Raises NoCorpus where neither it nor a build is there, or Damaged."""
    state = unfinished(folder)
    try:
        header = read_header(folder)
    except NoCorpus:
        if state is None:
            raise
        return Description(None, state)
    # One that was ended after its last step but before it removed its notes is finished.
    return Description(header, state if state and state.generation > header.generation else None)


def verify(folder: Path) -> CorpusHeader:
    """Reads every byte of a corpus and checks it. Raises NoCorpus, or Damaged, which names the file."""
    header = read_header(folder)
    for shard in header.shards:
        for file in shard.files:
            _verify_file(folder, file)
    return header


def _verify_file(folder: Path, file: FileRecord) -> None:
    path = folder / file.name
    known = hashlib.blake2b(digest_size=32)
    size = 0
    try:
        with open(path, "rb") as opened:
            while data := opened.read(READ_BYTES):
                known.update(data)
                size += len(data)
    except OSError as error:
        raise Damaged(f"{path}: damaged: cannot be read: {error.strerror}") from error
    if size != file.bytes:
        raise Damaged(f"{path}: damaged: {size} bytes, not {file.bytes}")
    if known.hexdigest() != file.blake2b:
        raise Damaged(f"{path}: damaged: its checksum does not fit its bytes")


def merge(
    folder: Path,
    parts: Sequence[Path],
    *,
    shard_tokens: int = SHARD_TOKENS,
    replace: bool = True,
    report: Callable[[BuildProgress], None] = lambda progress: None,
) -> Built:
    """Makes `folder` a corpus of all documents of `parts`, which it may be one of; they stay.

    Few full shards are searched faster than many small ones. A corpus in `folder` that is none of the parts
    is replaced only where `replace` is True. Raises what `build` and `verify` raise, WrongTokenizer where the
    parts' tokenizers differ, BadSource where their tenants do.
    """
    if not parts:
        raise BadSource("nothing to merge")
    corpora = [(part.absolute(), verify(part)) for part in parts]
    first = corpora[0][1]
    for path, header in corpora[1:]:
        if header.tokenizer != first.tokenizer:
            raise WrongTokenizer(
                f"{path}: built with the tokenizer of digest {header.tokenizer}, {parts[0]} with that of"
                f" digest {first.tokenizer}: their ids mean different things"
            )
        if header.tenant != first.tenant:
            raise BadSource(
                f"{path}: belongs to {header.owner}, {parts[0]} to {first.owner}:"
                " what is merged has one owner"
            )
    settings = CorpusSettings(first.tokenizer, first.vocabulary, first.tenant, shard_tokens)
    replace = replace or folder.absolute() in (path for path, _ in corpora)
    return build(folder, settings, StoredDocuments(corpora), report=report, replace=replace)


def remove(folder: Path, disk: Disk | None = None) -> None:
    """Removes a corpus, an unfinished build, or what is left of either; an empty folder goes too.

    Indexes that have it open stay usable. Raises Held, NoCorpus where nothing there is part of a corpus.
    """
    disk = disk or Disk()
    if not folder.is_dir() or not any(is_ours(path.name) for path in folder.iterdir()):
        raise NoCorpus(f"{folder}: no corpus there")
    try:
        with held(folder):
            disk.remove(folder / HEADER)  # first: from here on it is no corpus
            disk.sync_folder(folder)
            for path in sorted(folder.iterdir()):
                if is_ours(path.name) and path.name != LOCK:
                    disk.remove(path)
            disk.remove(folder / LOCK)
        if not any(folder.iterdir()):
            folder.rmdir()
    except OSError as error:
        raise CorpusError(f"{folder}: cannot be removed: {error}") from error


def is_unfinished(folder: Path) -> bool:
    """Whether a folder holds files of a build that never ended, or of a corpus before it. Raises Damaged."""
    try:
        whole = read_header(folder).names | {HEADER, LOCK}
    except NoCorpus:
        whole = frozenset()
    return any(is_ours(path.name) and path.name not in whole for path in folder.iterdir())


def discard(folder: Path, disk: Disk | None = None) -> None:
    """Removes what an unfinished build has left; a complete corpus stays as it is. Raises Held."""
    disk = disk or Disk()
    if not folder.is_dir():
        return
    try:
        with held(folder):
            try:
                wanted = read_header(folder).names | {HEADER, LOCK}
            except NoCorpus:
                wanted = frozenset({LOCK})
            for path in sorted(folder.iterdir()):
                if is_ours(path.name) and path.name not in wanted:
                    disk.remove(path)
            if HEADER not in wanted:
                disk.remove(folder / LOCK)
        if not any(folder.iterdir()):
            folder.rmdir()
    except OSError as error:
        raise CorpusError(f"{folder}: cannot be cleared: {error}") from error
