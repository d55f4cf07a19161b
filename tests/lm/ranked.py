"""One rank of a pair: `python -m tests.lm.ranked FOLDER...` loads each model, and drives it or follows.

The first rank saves beside each model what `drive` found ("logits.pt", "states.pt") and what the layers give
that it has whole ("whole.pt"), or why it was refused ("refused.txt"). What it drives is what a test drives in
one process.
"""

import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from outrider.lm.features import LAST
from outrider.lm.heads.target_parts import TargetParts
from outrider.lm.kv.blocks import BLOCK
from outrider.lm.kv.pool import GuestRoom
from outrider.lm.kv.table import SlotTable
from outrider.lm.outcome import OutcomeWants
from outrider.lm.parallel.leader import Leader, follow_leader
from outrider.lm.parallel.rank_group import RankGroup, RankInfo
from outrider.lm.plan import SequenceRows
from outrider.lm.runner import PackedLM
from speculative.errors import ModelRefused
from tests.lm.families import VOCABULARY

TIMEOUT_S = 30.0
STEPS = 12
GUEST = "guest"
"""A model in a folder whose name ends so has a guest in its pool."""
INT8 = "int8"
"""A model in a folder whose name ends so keeps keys and values in int8."""
ROOM = GuestRoom(planes=((2, 4), (1, 8)), features=1)
LAYERS = (0, 2, LAST)


class Found(NamedTuple):
    """What a model computed: logits of all wanted rows, and hidden states of all rows."""

    logits: torch.Tensor
    """``[wanted rows, vocabulary]``."""
    states: torch.Tensor
    """Of LAYERS: ``[layers, rows, width]``."""


class Whole(NamedTuple):
    """What a model's embeddings and output layer give."""

    embedded: torch.Tensor
    """Of all ids: ``[vocabulary, width]``."""
    logits: torch.Tensor
    """Of these embeddings as hidden states: ``[vocabulary, vocabulary]``."""
    is_tied: bool
    """Whether both are one weight in memory."""

    @classmethod
    def of(cls, parts: TargetParts) -> "Whole":
        embed, lm_head = cast(Any, parts.embed), cast(Any, parts.lm_head)
        embedded = embed(torch.arange(VOCABULARY))
        return cls(embedded, lm_head(embedded), embed.weight.data_ptr() == lm_head.weight.data_ptr())


class Passes:
    """Runs passes of a model and keeps what they gave."""

    def __init__(self, lm: PackedLM) -> None:
        self.lm = lm
        self._logits: list[torch.Tensor] = []
        self._states: list[torch.Tensor] = []
        lm.wants = OutcomeWants(features=LAYERS)

    def run(self, sequences: Sequence[SequenceRows]) -> None:
        outcome = self.lm.forward(sequences)
        self._logits.append(torch.from_numpy(outcome.rows()).clone())
        assert outcome.features is not None
        self._states.append(outcome.features.clone())

    def found(self) -> Found:
        return Found(torch.cat(self._logits), torch.cat(self._states, dim=1))


def drive(lm: PackedLM, longest: int) -> Found:
    """Logits and hidden states of trees of several sessions, which commit, share, copy and end at random.

    A guest's rows of the first prompt have to stay with its tokens.
    """
    dice = random.Random(5)
    passes = Passes(lm)
    tables = [prefilled(passes, dice, longest // 2) for _ in range(3)]
    first = tables[0]
    guest_write(lm, first)
    prompt = first.length
    adopted, copied = SlotTable(lm.pool), SlotTable(lm.pool)
    adopted.adopt(first.blocks[: first.length // BLOCK])
    copied.copy_of(first.blocks[: first.length // BLOCK])
    tables += [adopted, copied]
    for step in range(STEPS):
        live = [table for table in tables if table.length + table.nodes + 8 < longest]
        sequences = [tree(table, dice) for table in dice.sample(live, min(3, len(live)))]
        passes.run(sequences)
        for sequence in sequences:
            table = sequence.table
            table.commit(way(table.parents, dice.randrange(table.nodes)))
            if dice.random() < 0.5:
                table.drop_nodes()
        if step == STEPS // 2:
            lm.release(tables.pop(1))
            # Now storage must grow, and what was there keep its place.
            tables += [lm.table(reserve=lm.pool.slots // 2 + 1) for _ in range(2)]
    guest_check(lm, first, prompt)
    for table in (adopted, copied):
        guest_check(lm, table, prompt // BLOCK * BLOCK)
    for table in tables:
        lm.release(table)
    return passes.found()


def prefilled(passes: Passes, dice: random.Random, length: int) -> SlotTable:
    table = passes.lm.table()
    tokens = [dice.randrange(VOCABULARY) for _ in range(length)]
    passes.run([SequenceRows(table, tokens, range(-1, length - 1), ())])
    table.commit(range(length))
    return table


def tree(table: SlotTable, dice: random.Random) -> SequenceRows:
    count = dice.randint(1, 7)
    tokens = [dice.randrange(VOCABULARY) for _ in range(count)]
    parents = [dice.randrange(-1, table.nodes + row) for row in range(count)]
    return SequenceRows(table, tokens, parents, range(count))


def way(parents: list[int], node: int) -> list[int]:
    found: list[int] = []
    while node >= 0:
        found.insert(0, node)
        node = parents[node]
    return found


@torch.inference_mode()
def guest_write(lm: PackedLM, table: SlotTable) -> None:
    """Writes each position's number into the guest's planes."""
    for plane in guest_planes(lm):
        for position, slot in enumerate(table.slots(0, table.length)):
            plane[:, slot] = position


def guest_check(lm: PackedLM, table: SlotTable, length: int) -> None:
    """Raises AssertionError where the guest's planes lack the number of one of the first positions."""
    expected = torch.arange(length, dtype=torch.float32)
    for plane in guest_planes(lm):
        assert (plane[:, table.slots(0, length)] == expected[None, :, None]).all()


def guest_planes(lm: PackedLM) -> Sequence[torch.Tensor]:
    planes = lm.pool.planes()
    return planes[len(planes) - lm.pool.layout.guests :]


def take_part(folder: Path, rank_group: RankGroup, longest: int) -> None:
    """Loads; then drives if this is the first rank, else follows."""
    try:
        guest = ROOM if folder.name.endswith(GUEST) else None
        lm = PackedLM.load(
            folder,
            rank_group=rank_group,
            whole=("embed", "lm_head"),
            guest=guest,
            int8_kv=folder.name.endswith(INT8),
        )
    except ModelRefused as error:
        if rank_group.info.rank == 0:
            (folder / "refused.txt").write_text(str(error))
        return
    assert (lm.whole_parts is None) == (rank_group.info.rank > 0)
    if lm.whole_parts is None:
        follow_leader(lm, rank_group)
        return
    lead = Leader(lm, rank_group, lambda error: os._exit(3))
    torch.save(tuple(Whole.of(lm.whole_parts)), folder / "whole.pt")
    found = drive(lm, longest)
    torch.save(found.logits, folder / "logits.pt")
    torch.save(found.states, folder / "states.pt")
    (folder / "heads.txt").write_text(str(lm.pool.layout.planes[0][0]))
    lm.pool.check_integrity()
    lead.close()


def main() -> None:
    info = RankInfo.of(os.environ)
    assert info is not None
    rank_group = RankGroup.join(info, "cpu", TIMEOUT_S)
    longest = int(sys.argv[1])
    for folder in sys.argv[2:]:
        take_part(Path(folder), rank_group, longest)
        rank_group.meet(folder)


if __name__ == "__main__":
    main()
    os._exit(0)
