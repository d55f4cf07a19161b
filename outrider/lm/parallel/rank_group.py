"""Tensor parallelism: several processes (ranks) with a part of one model each; rank 0 alone decides.

Rank 0 sends the others their orders, and they compute nothing else. All ranks live and die together: a rank
that ends, or does not answer within the timeout, is a `RankLost` on the ranks that wait for it. Runs under
torchrun, or any launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torchrun does.
"""

import contextlib
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from speculative.errors import InvalidRequest, Unavailable

_GATHER = timedelta(minutes=30)
"""Longest time between the first and the last rank to start or to finish loading."""

_PAGE = 1024
"""Number of words in a message's first part; its first word is the number of words in the message."""


class RankLost(Unavailable):
    """Another rank has ended, hangs, or disagrees; this rank cannot go on either."""


@dataclass(frozen=True, slots=True)
class RankInfo:
    """The number of this rank, among all ranks and on this machine."""

    rank: int
    """Number of this rank, from 0."""
    size: int
    """Number of ranks."""
    local_rank: int
    """Number of this rank among those of this machine, from 0; the index of its device."""

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "RankInfo | None":
        """Reads torchrun's variables; None for a single process. Raises InvalidRequest for wrong ones."""
        size = environment.get("WORLD_SIZE", "1")
        if size == "1":
            return None
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        if missing := [name for name in names if not environment.get(name)]:
            raise InvalidRequest(
                f"WORLD_SIZE is {size}, but {', '.join(missing)} not set; start with torchrun"
            )
        rank, local = environment["RANK"], environment.get("LOCAL_RANK", environment["RANK"])
        if not all(number.isdecimal() for number in (rank, size, local)) or int(rank) >= int(size):
            raise InvalidRequest(
                f"RANK = {rank!r}, LOCAL_RANK = {local!r} and WORLD_SIZE = {size!r} cannot be"
            )
        return cls(int(rank), int(size), int(local))

    def device(self, asked: str) -> str:
        """Name of this rank's torch device; ``auto`` is the kind that transformers takes.

        Raises InvalidRequest for another kind.
        """
        found = torch.accelerator.current_accelerator()
        kind = "cpu" if found is None else found.type
        if asked not in ("auto", kind):
            raise InvalidRequest(
                f"device = {asked!r}: {self.size} ranks run on {kind!r} here, one device each"
            )
        return kind if kind == "cpu" else f"{kind}:{self.local_rank}"


class RankGroup:
    """The group of ranks that have joined each other."""

    def __init__(self, info: RankInfo, store: Any, orders: Any, timeout_s: float) -> None:
        """Holds the connections of a group; `join` makes them."""
        self.info = info
        self.timeout_s = timeout_s
        self._store = store
        self._orders = orders

    @classmethod
    def join(
        cls, info: RankInfo, device: str, timeout_s: float, listener: socket.socket | None = None
    ) -> "RankGroup":
        """Waits until all ranks have joined. From then on each wait for a rank lasts at most ``timeout_s``.

        ``listener`` is a socket of rank 0 that listens at MASTER_ADDR and MASTER_PORT already; the group
        takes it over. Raises RankLost where the ranks do not join.
        """
        timeout = timedelta(seconds=timeout_s)
        kind = torch.device(device).type
        try:
            rank_group = cls(info, _store(info, listener), None, timeout_s)
            rank_group.meet("joined")
            dist.init_process_group(
                "gloo" if kind == "cpu" else "nccl",
                store=rank_group._store,
                rank=info.rank,
                world_size=info.size,
                timeout=timeout,
            )
            # Orders never wait for a device, so they have a process group of their own, on the CPU.
            rank_group._orders = dist.new_group(backend="gloo", timeout=timeout)
        except RuntimeError as error:
            raise RankLost(f"{info.size} ranks did not come together: {_first_line(error)}") from error
        return rank_group

    def meet(self, where: str, within: timedelta = _GATHER) -> None:
        """Waits until every rank calls this with the same ``where``, by default as long as loading may take.

        Rank 0 leaves last: the store in which ranks meet ends with it, and others may still have to read it.
        Raises RankLost.
        """
        try:
            self._say(f"{where}/here")
            self._store.wait(_keys(f"{where}/here", range(self.info.size)), within)
            if self.info.rank:
                self._say(f"{where}/seen")
            else:
                # All ranks have come, so a rank that does not confirm has ended since.
                soon = timedelta(seconds=self.timeout_s)
                self._store.wait(_keys(f"{where}/seen", range(1, self.info.size)), soon)
        except RuntimeError as error:
            raise RankLost(f"not all of {self.info.size} ranks have {where}: {_first_line(error)}") from error

    def check_agreed(self, refusal: Exception) -> None:
        """Waits until every rank refuses the model. Raises RankLost where another rank does not refuse it."""
        try:
            self.meet("refused", timedelta(seconds=self.timeout_s))
        except RankLost:
            raise self.lost("while the model was checked a rank", refusal) from refusal

    def least(self, number: int) -> int:
        """The least of all ranks' numbers; every rank calls this. Raises RankLost."""
        found = torch.tensor([number])
        try:
            dist.all_reduce(found, dist.ReduceOp.MIN, group=self._orders)
        except RuntimeError as error:
            raise self.lost("a rank", error) from error
        return int(found)

    def broadcast(self, words: Sequence[int]) -> None:
        """Sends a message of rank 0 to all others. Raises RankLost, naming a rank that does not take it."""
        message = np.zeros(max(_PAGE, 1 + len(words)), dtype=np.int64)
        message[0] = len(words)
        message[1 : 1 + len(words)] = words
        whole = torch.from_numpy(message)
        for part in (whole[:_PAGE], whole[_PAGE:]):
            if len(part):
                self._send(part)

    def receive(self) -> list[int]:
        """Receives the next message of rank 0. Raises RankLost where rank 0 is silent for the timeout."""
        page = torch.zeros(_PAGE, dtype=torch.int64)
        try:
            dist.recv(page, 0, group=self._orders)
            count = int(page[0])
            rest = torch.zeros(max(0, 1 + count - _PAGE), dtype=torch.int64)
            if len(rest):
                dist.recv(rest, 0, group=self._orders)
        except RuntimeError as error:
            raise self.lost("rank 0", error) from error
        words: list[int] = torch.cat((page[1:], rest))[:count].tolist()
        return words

    def wait_for_the_end(self) -> None:
        """Discards messages until rank 0 has ended, or is silent for the timeout."""
        with contextlib.suppress(RankLost):
            while True:
                self.receive()

    def lost(self, who: str, error: Exception) -> RankLost:
        """The RankLost that names the rank ``who`` that did not answer, and the error that showed it."""
        return RankLost(
            f"{who} of {self.info.size} is lost, and all end with it (ranks_timeout_s = "
            f"{self.timeout_s:g}): {_first_line(error)}"
        )

    def _say(self, what: str) -> None:
        (key,) = _keys(what, [self.info.rank])
        self._store.set(key, "yes")

    def _send(self, part: torch.Tensor) -> None:
        sent: list[Any] = []
        for rank in range(1, self.info.size):
            try:
                sent.append(dist.isend(part, rank, group=self._orders))
            except RuntimeError as error:
                raise self.lost(f"rank {rank}", error) from error
        for rank, work in enumerate(sent, start=1):
            try:
                work.wait()
            except RuntimeError as error:
                raise self.lost(f"rank {rank}", error) from error


def _store(info: RankInfo, listener: socket.socket | None) -> Any:
    """The store in which the ranks find each other."""
    if listener is None:
        return next(dist.rendezvous("env://", timeout=_GATHER))[0]  # type: ignore[attr-defined]
    host, port = listener.getsockname()
    return dist.TCPStore(  # type: ignore[attr-defined]
        host,
        port,
        info.size,
        is_master=True,
        timeout=_GATHER,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _keys(what: str, ranks: Iterable[int]) -> list[str]:
    return [f"outrider/{what}/{rank}" for rank in ranks]


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
