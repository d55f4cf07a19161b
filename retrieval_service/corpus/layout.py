"""What stands in a corpus' folder, and the header that says which of it counts.

::

    header.json               the complete corpus; a folder is a corpus if, and only if, it has one
    build.json                how far an unfinished build has come
    lock                      held by the process that writes, which it names
    000001-00000.text         ids of shard 0 of generation 1, big-endian, `width` bytes each
    000001-00000.suffixes     uint32, little-endian: its positions that are followed by something, in order
    000001-00000.directory    the first ids of every 1024th of these, to look up where to begin

A text holds its documents one after the other, each *backwards* and closed by the separator, the highest
value of its width, which is no token's id. What precedes a token is then what follows it in the text, so
that one search finds the longest suffix of any context; and no match and no draft leaves its document.
"""

import hashlib
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from retrieval_service.corpus.errors import Damaged, NoCorpus

FORMAT, VERSION = "outrider-corpus", 2
HEADER, BUILD, LOCK = "header.json", "build.json", "lock"
STRIDE = 1024
"""Suffixes per entry of a directory."""
ENTRY_IDS = 16
"""Ids that an entry of a directory holds, zeros where the text ends before."""
LARGEST_VOCABULARY = 2**24 - 1
_OURS = re.compile(r"(header|build)\.json(\.tmp)?|lock|\d{6}-\d{5}\.(text|suffixes|directory)")

assert sys.byteorder == "little", "suffixes are mapped as they stand on disk, which is little-endian"


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file of the folder: its name, its length in bytes, its BLAKE2b (256 bits) in hexadecimal."""

    name: str
    bytes: int
    blake2b: str


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """A shard: its tokens (separators not counted), documents and positions to search among."""

    tokens: int
    documents: int
    positions: int
    text: FileRecord
    suffixes: FileRecord
    directory: FileRecord

    @property
    def files(self) -> tuple[FileRecord, FileRecord, FileRecord]:
        return self.text, self.suffixes, self.directory

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> Self:
        """A shard's record from its `asdict` form."""
        files = {name: FileRecord(**said[name]) for name in ("text", "suffixes", "directory")}
        return cls(said["tokens"], said["documents"], said["positions"], **files)


@dataclass(frozen=True, slots=True)
class CorpusHeader:
    """Header of a complete corpus: its properties and its files.

    Attributes:
        generation: counts the builds that were finished on this path, from 1.
        tokenizer: `TokenTable.digest` of the tokenizer whose ids these are.
        vocabulary: all ids are below this.
        tenant: the owner; None: everybody.
        source: hash of where the documents came from and how they were read, hexadecimal.
        shards: in the order they were written.
    """

    generation: int
    tokenizer: str
    vocabulary: int
    tenant: str | None
    source: str
    shards: tuple[ShardRecord, ...]

    @property
    def owner(self) -> str:
        """The corpus' owner in words."""
        return "everybody" if self.tenant is None else f"tenant {self.tenant!r}"

    @property
    def width(self) -> int:
        """Bytes of an id in the text."""
        return width_of(self.vocabulary)

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards)

    @property
    def size(self) -> int:
        """Size in bytes of all files of the corpus."""
        return sum(file.bytes for shard in self.shards for file in shard.files)

    @property
    def names(self) -> frozenset[str]:
        """Names of all files of the corpus."""
        return frozenset(file.name for shard in self.shards for file in shard.files)

    def to_json(self) -> bytes:
        """The header as sealed JSON; `read_header` reads it back."""
        return sealed({"format": FORMAT, "version": VERSION, **asdict(self)})

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> Self:
        """A header from its unsealed JSON object."""
        shards = tuple(ShardRecord.of(shard) for shard in said["shards"])
        return cls(
            said["generation"], said["tokenizer"], said["vocabulary"], said["tenant"], said["source"], shards
        )


def width_of(vocabulary: int) -> int:
    """Bytes of an id in the text: 2 where 16 bits hold all ids and the separator, else 4."""
    return 2 if vocabulary <= 0xFFFF else 4


def sealed(said: Mapping[str, Any]) -> bytes:
    """The fields as JSON, with a checksum over them."""
    return json.dumps({**said, "checksum": _checksum(said)}, indent=1).encode() + b"\n"


def unsealed(path: Path) -> dict[str, Any]:
    """The fields of a sealed file. Raises Damaged where the checksum is wrong, OSError where no file is."""
    try:
        said = json.loads(path.read_bytes())
        checksum = said.pop("checksum")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"{path}: damaged: not what was written") from error
    if checksum != _checksum(said):
        raise Damaged(f"{path}: damaged: its checksum does not fit its text")
    return dict(said)


def read_header(folder: Path) -> CorpusHeader:
    """The header of the corpus in a folder. Raises NoCorpus where none is complete there, or Damaged."""
    try:
        said = unsealed(folder / HEADER)
    except (FileNotFoundError, NotADirectoryError):
        raise NoCorpus(f"{folder}: {_absence(folder)}") from None
    except OSError as error:
        raise Damaged(f"{folder / HEADER}: cannot be read: {error.strerror}") from error
    if said.get("format") != FORMAT or said.get("version") != VERSION:
        kind = f"{said.get('format')!r} version {said.get('version')!r}"
        raise NoCorpus(f"{folder}: holds {kind}; this program reads {FORMAT!r} version {VERSION}")
    return CorpusHeader.of(said)


def _absence(folder: Path) -> str:
    if not folder.is_dir():
        return "no corpus there"
    if (folder / BUILD).exists() or any(is_ours(path.name) for path in folder.iterdir()):
        return "a corpus under construction: its build was not finished; build again to continue it"
    return "a folder, but no corpus: it has no header.json"


def is_ours(name: str) -> bool:
    """Whether a file of this name is part of a corpus."""
    return _OURS.fullmatch(name) is not None


def _checksum(said: Mapping[str, Any]) -> str:
    text = json.dumps(said, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=32).hexdigest()
