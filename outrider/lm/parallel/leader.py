"""The two ends of a model that several ranks hold: rank 0 leads, the others follow.

The engine uses the leader's `PackedLM` as it uses any; the leader sends every change of storage and every
pass to the followers, which repeat it on theirs. A pass is one message: the copies and growth since the last
message, then the rows.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from outrider.lm.kv.table import SlotTable
from outrider.lm.parallel.messages import (
    CopySlots,
    GrowPool,
    RankBeat,
    RankedRows,
    RankEnd,
    RankHello,
    RankMessage,
    RankPass,
    from_words,
    to_words,
)
from outrider.lm.parallel.rank_group import RankGroup, RankLost
from outrider.lm.plan import SequenceRows
from outrider.lm.runner import PackedLM

_BEAT_S = 1.0


class Leader:
    """Rank 0's end: sends orders to the other ranks, and beats while it is idle.

    Args:
        lm: model, loaded on every rank alike; only the engine thread calls here, but for beats and `close`.
        rank_group: group of all ranks.
        lost: called from the beating thread when a rank is lost while no pass runs.
    """

    def __init__(self, lm: PackedLM, rank_group: RankGroup, lost: Callable[[RankLost], None]) -> None:
        self._rank_group = rank_group
        self._lost = lost
        self._moves: list[int] = []
        self._broken: RankLost | None = None
        self._using = threading.Lock()  # the line to the others; held throughout a pass
        self._ended = threading.Event()
        self._beats = threading.Thread(target=self._beat, name="ranks", daemon=True)
        self._send(RankHello(_figures(lm)))
        lm.pool.grown = lambda blocks: self._note(GrowPool(blocks))
        lm.pool.copied = lambda sources, targets: self._note(CopySlots(tuple(sources), tuple(targets)))
        lm.around_pass = self._passing
        self._beats.start()

    def close(self) -> None:
        """Sends the other ranks their end; during a pass they notice when this process has ended.

        Raises RankLost if a rank does not take the message.
        """
        self._ended.set()
        if self._using.acquire(timeout=_BEAT_S):
            try:
                self._send(RankEnd())
            finally:
                self._using.release()

    def _note(self, order: RankMessage) -> None:
        self._moves += to_words(order)

    def _send(self, order: RankMessage) -> None:
        """Sends an order, preceded by the storage changes noted since the last message."""
        if self._broken is not None:
            raise self._broken
        words, self._moves = self._moves + to_words(order), []
        try:
            self._rank_group.broadcast(words)
        except RankLost as error:
            self._broken = error
            raise

    @contextmanager
    def _passing(self, sequences: Sequence[SequenceRows]) -> Iterator[None]:
        """Sends a pass and runs it; a failure leaves ranks waiting for each other, so none can go on."""
        with self._using:
            self._send(RankPass(tuple(map(_part, sequences))))
            try:
                yield
            except Exception as error:
                self._broken = self._rank_group.lost("in the middle of a pass a rank", error)
                raise self._broken from error

    def _beat(self) -> None:
        """Beats every second, which also finds out whether the other ranks are alive."""
        while not self._ended.wait(min(_BEAT_S, self._rank_group.timeout_s / 4)):
            # A pass is as good a sign of life as a beat, and no beat may delay it.
            if not self._using.acquire(blocking=False):
                continue
            try:
                if not self._ended.is_set():
                    self._rank_group.broadcast(to_words(RankBeat()))
            except RankLost as error:
                self._broken = error
                self._lost(error)
                return
            finally:
                self._using.release()


def follow_leader(lm: PackedLM, rank_group: RankGroup) -> None:
    """Carries out the orders of rank 0 until it sends End. Raises RankLost."""
    while True:
        for order in from_words(rank_group.receive()):
            match order:
                case RankEnd():
                    return
                case RankHello(figures):
                    if figures != _figures(lm):
                        raise RankLost(
                            f"rank {rank_group.info.rank} has another model or memory than rank 0 "
                            f"({_figures(lm)}, {figures}); start all with the same settings"
                        )
                case GrowPool(blocks):
                    lm.pool.grow(blocks)
                case CopySlots(sources, targets):
                    lm.pool.copy(sources, targets)
                case RankPass(parts):
                    lm.repeat([_share(lm, part) for part in parts])


def _figures(lm: PackedLM) -> tuple[int, ...]:
    layout = lm.pool.layout
    return (
        lm.vocabulary_size,
        lm.max_length,
        layout.slot_bytes,
        lm.pool.blocks.capacity,
        lm.pool.max_blocks,
        layout.guests,
        layout.tail,
        *(number for plane in layout.planes for number in plane),
    )


def _part(sequence: SequenceRows) -> RankedRows:
    table = sequence.table
    return RankedRows(
        tuple(table.all_runs),
        table.length,
        tuple(table.parents),
        tuple(sequence.tokens),
        tuple(sequence.parents),
        tuple(sequence.want),
    )


def _share(lm: PackedLM, part: RankedRows) -> SequenceRows:
    table = SlotTable.at(lm.pool, part.runs, part.length, part.kept)
    if table.lacks(part.length + len(part.kept) + len(part.tokens)):
        raise RankLost("rank 0 sent a pass that has no room for its rows")
    return SequenceRows(table, part.tokens, part.parents, part.want)
