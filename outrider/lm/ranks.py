"""Several processes with a part of one model each (tensor parallelism), of which the first alone decides.

The first rank tells the others what to compute; they compute it and nothing else. All of them live and die
together: one that ends, or does not take part within the timeout, is a `RankLost` on those that wait for it.
Under torchrun, or whatever sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as it does.
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
"""How far apart ranks may start and load."""

_PAGE = 1024
"""Words of a message's first part, the first of which is how many there are in all."""


class RankLost(Unavailable):
    """Another rank is gone, hangs, or has something else in mind; this one cannot go on either."""


@dataclass(frozen=True, slots=True)
class Place:
    """Which of how many processes this is, in all and on this machine."""

    rank: int
    size: int
    local_rank: int

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "Place | None":
        """As torchrun says it; None for a process of its own. Raises InvalidRequest for what cannot be."""
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
        """This rank's torch device. Raises InvalidRequest where transformers would take another kind."""
        found = torch.accelerator.current_accelerator()
        kind = "cpu" if found is None else found.type
        if asked != kind:
            raise InvalidRequest(
                f"device = {asked!r}: {self.size} ranks run on {kind!r} here, one device each"
            )
        return asked if asked == "cpu" else f"{asked}:{self.local_rank}"


class Crew:
    """The ranks that have joined each other."""

    def __init__(self, place: Place, store: Any, orders: Any, timeout_s: float) -> None:
        """See `join`."""
        self.place = place
        self.timeout_s = timeout_s
        self._store = store
        self._orders = orders

    @classmethod
    def join(
        cls, place: Place, device: str, timeout_s: float, listener: socket.socket | None = None
    ) -> "Crew":
        """Waits for all ranks. From then on a rank that is waited for has ``timeout_s``.

        ``listener`` is the first rank's, where it listens at MASTER_ADDR and MASTER_PORT already; it is taken
        over. Raises RankLost where they do not come together.
        """
        timeout = timedelta(seconds=timeout_s)
        kind = torch.device(device).type
        try:
            crew = cls(place, _store(place, listener), None, timeout_s)
            crew.meet("joined")
            dist.init_process_group(
                "gloo" if kind == "cpu" else "nccl",
                store=crew._store,
                rank=place.rank,
                world_size=place.size,
                timeout=timeout,
            )
            # Orders never wait for a device, so they have a group of their own, on the CPU.
            crew._orders = dist.new_group(backend="gloo", timeout=timeout)
        except RuntimeError as error:
            raise RankLost(f"{place.size} ranks did not come together: {_first_line(error)}") from error
        return crew

    def meet(self, where: str, within: timedelta = _GATHER) -> None:
        """Waits until every rank has come here, by default as long as loading may take. Raises RankLost.

        The first rank leaves last: where ranks meet is gone with it, and others may not have looked yet.
        """
        try:
            self._say(f"{where}/here")
            self._store.wait(_keys(f"{where}/here", range(self.place.size)), within)
            if self.place.rank:
                self._say(f"{where}/seen")
            else:
                # All have come, so one that does not look any more has ended since.
                soon = timedelta(seconds=self.timeout_s)
                self._store.wait(_keys(f"{where}/seen", range(1, self.place.size)), soon)
        except RuntimeError as error:
            raise RankLost(
                f"not all of {self.place.size} ranks have {where}: {_first_line(error)}"
            ) from error

    def check_agreed(self, refusal: Exception) -> None:
        """Every rank refuses a model or none does. Raises RankLost where another has not refused this one."""
        try:
            self.meet("refused", timedelta(seconds=self.timeout_s))
        except RankLost:
            raise self.lost("while the model was checked a rank", refusal) from refusal

    def tell(self, words: Sequence[int]) -> None:
        """From the first rank to all others. Raises RankLost, naming the rank that does not take it."""
        message = np.zeros(max(_PAGE, 1 + len(words)), dtype=np.int64)
        message[0] = len(words)
        message[1 : 1 + len(words)] = words
        whole = torch.from_numpy(message)
        for part in (whole[:_PAGE], whole[_PAGE:]):
            if len(part):
                self._send(part)

    def hear(self) -> list[int]:
        """What the first rank tells next. Raises RankLost where it is silent for the timeout."""
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
        """Hears nothing more; returns when the first rank has ended, or is silent for the timeout."""
        with contextlib.suppress(RankLost):
            while True:
                self.hear()

    def lost(self, who: str, error: Exception) -> RankLost:
        """Says who was waited for in vain, and what was found out about it."""
        return RankLost(
            f"{who} of {self.place.size} is lost, and all end with it (ranks_timeout_s = "
            f"{self.timeout_s:g}): {_first_line(error)}"
        )

    def _say(self, what: str) -> None:
        (key,) = _keys(what, [self.place.rank])
        self._store.set(key, "yes")

    def _send(self, part: torch.Tensor) -> None:
        sent: list[Any] = []
        for rank in range(1, self.place.size):
            try:
                sent.append(dist.isend(part, rank, group=self._orders))
            except RuntimeError as error:
                raise self.lost(f"rank {rank}", error) from error
        for rank, work in enumerate(sent, start=1):
            try:
                work.wait()
            except RuntimeError as error:
                raise self.lost(f"rank {rank}", error) from error


def _store(place: Place, listener: socket.socket | None) -> Any:
    """Where the ranks find each other."""
    if listener is None:
        return next(dist.rendezvous("env://", timeout=_GATHER))[0]  # type: ignore[attr-defined]
    host, port = listener.getsockname()
    return dist.TCPStore(  # type: ignore[attr-defined]
        host,
        port,
        place.size,
        is_master=True,
        timeout=_GATHER,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _keys(what: str, ranks: Iterable[int]) -> list[str]:
    return [f"outrider/{what}/{rank}" for rank in ranks]


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
