"""Ends builds with SIGKILL at seeded points, and looks at what each leaves: a process of its own, that forks.

Prints a JSON object: how many ended builds left the old corpus, the new one, and none.
"""

import json
import os
import random
import shutil
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pydivsufsort  # noqa: F401  # once, not in every child
from corpora import Documents, Unsynced, documents_in, make_corpus
from stepping_disk import SteppingDisk

from retrieval_service.corpus.disk import Disk
from retrieval_service.corpus.errors import NoCorpus
from retrieval_service.corpus.index import CorpusIndex
from retrieval_service.corpus.layout import read_header
from retrieval_service.corpus.manage import describe, verify

SHARD_TOKENS = 64


class Counting(Unsynced, SteppingDisk):
    """A Disk that counts its changes."""

    def __init__(self) -> None:
        self.steps = 0

    def step(self) -> None:
        self.steps += 1

    def rename(self, path: Path, to: Path) -> None:
        super().rename(path, to)
        self.step()


class Killing(Counting):
    """A Disk that kills its process at the nth change; a write may be half done then."""

    def __init__(self, at: int, part: float) -> None:
        super().__init__()
        self.at, self.part = at, part

    def step(self) -> None:
        super().step()
        if self.steps == self.at:
            os.kill(os.getpid(), signal.SIGKILL)

    def write(self, file: BinaryIO, data: bytes | bytearray | memoryview) -> None:
        if self.steps + 1 == self.at:
            Disk().write(file, memoryview(data)[: int(len(data) * self.part)])
        super().write(file, data)


def documents(seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 50, int(rng.integers(1, 40))).tolist() for _ in range(30)]


OLD, NEW = documents(1), documents(2)


def killed(folder: Path, at: int, part: float) -> bool:
    """Builds in a child that is killed at a step; False if the build ended before."""
    child = os.fork()
    if not child:
        make_corpus(folder, Documents(NEW), shard_tokens=SHARD_TOKENS, disk=Killing(at, part))
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def state(folder: Path, found: Counter[str]) -> str:
    """The verified corpus in the folder: `old`, `new` or `none`."""
    try:
        verify(folder)
    except NoCorpus:
        try:
            CorpusIndex.open(folder)
        except NoCorpus as error:
            found["said under construction"] += "under construction" in str(error)
        return "none"
    held = documents_in(folder)
    generation = read_header(folder).generation
    assert held == (OLD if generation == 1 and held != NEW else NEW)
    said = describe(folder)
    found["said unfinished"] += said.unfinished is not None
    return "old" if held == OLD else "new"


def main(root: Path, seeds: int) -> None:
    counting = Counting()
    make_corpus(root / "whole", Documents(NEW), shard_tokens=SHARD_TOKENS, disk=counting)
    make_corpus(root / "old", OLD, shard_tokens=SHARD_TOKENS)
    found: Counter[str] = Counter()
    for seed in range(seeds):
        rng = random.Random(seed)
        folder = root / "corpus"
        if seed % 2:
            shutil.copytree(root / "old", folder)
        before = "old" if seed % 2 else "none"
        for _ in range(2):  # what goes on after a kill is killed as well
            ended = killed(folder, rng.randrange(1, counting.steps + 1), rng.random())
            now = state(folder, found)
            assert now in (before, "new"), (seed, before, now)
            found[now] += 1
            found["killed"] += ended
        built = make_corpus(folder, Documents(NEW), shard_tokens=SHARD_TOKENS, disk=Counting())
        found["shards kept"] += built.kept_shards
        assert state(folder, Counter()) == "new"
        named = {file.name for shard in built.header.shards for file in shard.files}
        assert {path.name for path in folder.iterdir()} == named | {"header.json", "lock"}, seed
        shutil.rmtree(folder)
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
