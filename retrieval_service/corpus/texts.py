"""Text from files, folders, JSON lines and standard input, in pieces of bounded size and a fixed order.

Files that are no text are left out and counted; a path that is named but missing is an error.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from io import StringIO, TextIOWrapper
from pathlib import Path
from typing import BinaryIO, TextIO

from retrieval_service.corpus.errors import BadSource

PIECE = 1 << 20
"""Characters. A longer text becomes several documents, cut after a line where there is one."""
LONGEST_LINE = 64 << 20
"""Bytes of a line of JSON."""
RUBBISH = 0.02
"""The share of characters that cannot be read from which on a piece is no text."""
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1a\x1c-\x1f\ufffd]")


@dataclass(slots=True)
class TextSource:
    """Files, folders or a stream to read texts from, and how to read them.

    Attributes:
        paths: files, and folders with all below them but hidden entries and `__pycache__`.
        globs: of a folder's files, those whose name or path below the folder fits one; empty: all.
        jsonl_field: if given, every line of every file is an object whose text is under this name.
        stdin: read last, if given.
        skip: folders below `paths` that are left out: the one of the corpus that is being made.
        left_out: how much was not text, by reason; filled while reading, anew each time.
    """

    paths: tuple[Path, ...]
    globs: tuple[str, ...] = ()
    jsonl_field: str | None = None
    stdin: BinaryIO | None = None
    skip: tuple[Path, ...] = ()
    left_out: Counter[str] = field(default_factory=Counter)

    @property
    def again(self) -> bool:
        """Whether the texts can be read a second time; standard input cannot."""
        return self.stdin is None

    def __iter__(self) -> Iterator[str]:
        """Texts of all documents; none is empty or has lone surrogates. Raises BadSource."""
        self.left_out.clear()
        for file in self.files():
            yield from self._of_file(file)
        if self.stdin is not None:
            yield from self._of_stream(self.stdin)

    def files(self) -> Iterator[Path]:
        """Texts in the order of reading. Raises BadSource."""
        for path in self.paths:
            if path.is_dir():
                yield from self._below(path)
            elif path.is_file():
                yield path
            else:
                raise BadSource(f"{path}: neither a file nor a folder")

    def _below(self, root: Path) -> Iterator[Path]:
        skipped = {os.path.realpath(path) for path in self.skip}
        for folder, folders, names in os.walk(root, onerror=self._unreadable):
            folders[:] = sorted(
                name
                for name in folders
                if not _hidden(name) and os.path.realpath(os.path.join(folder, name)) not in skipped
            )
            for name in sorted(names):
                path = Path(folder, name)
                below = path.relative_to(root).as_posix()
                wanted = any(fnmatch(name, glob) or fnmatch(below, glob) for glob in self.globs)
                # A pipe or a device would never end.
                if not _hidden(name) and (wanted or not self.globs) and path.is_file():
                    yield path

    def _unreadable(self, _: OSError) -> None:
        self.left_out["unreadable folders"] += 1

    def _of_file(self, path: Path) -> Iterator[str]:
        try:
            with open(path, "rb") as file:
                yield from self._of_stream(file)
        except OSError:
            self.left_out["unreadable files"] += 1

    def _of_stream(self, stream: BinaryIO) -> Iterator[str]:
        if self.jsonl_field is not None:
            yield from self._of_lines(stream, self.jsonl_field)
            return
        text = TextIOWrapper(stream, encoding="utf-8", errors="replace", newline="")
        try:
            for piece in _pieces(text):
                if _is_rubbish(piece):
                    self.left_out["binary files"] += 1
                    return
                yield piece
        finally:
            text.detach()

    def _of_lines(self, stream: BinaryIO, name: str) -> Iterator[str]:
        while line := stream.readline(LONGEST_LINE):
            if not line.endswith(b"\n") and len(line) == LONGEST_LINE:
                while (line := stream.readline(LONGEST_LINE)) and not line.endswith(b"\n"):
                    pass
                self.left_out["lines too long"] += 1
                continue
            text = _text_of(line, name)
            if text is None:
                self.left_out["lines without text"] += bool(line.strip())
                continue
            yield from _pieces(StringIO(text, newline=""))


def _text_of(line: bytes, name: str) -> str | None:
    try:
        text = json.loads(line)[name]
    except (ValueError, KeyError, TypeError, IndexError, RecursionError):
        return None
    if not isinstance(text, str) or not text:
        return None
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _pieces(text: TextIO) -> Iterator[str]:
    waiting = ""
    while more := text.read(PIECE - len(waiting)):
        waiting += more
        if len(waiting) < PIECE:
            continue
        line, word = waiting.rfind("\n", PIECE // 2), waiting.rfind(" ", PIECE // 2)
        cut = line + 1 if line > 0 else word if word > 0 else PIECE
        yield waiting[:cut]
        waiting = waiting[cut:]
    if waiting:
        yield waiting


def _is_rubbish(piece: str) -> bool:
    if "\0" in piece:
        return True
    return len(_CONTROL.findall(piece)) > RUBBISH * len(piece)


def _hidden(name: str) -> bool:
    return name.startswith(".") or name == "__pycache__"
