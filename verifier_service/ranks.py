"""A verifier of several processes, each with a part of the target (tensor parallelism).

The first rank is the verifier; the others follow it (`outrider.lm.lead`) and have no gRPC, clock or
scheduler. All end together: a rank that is lost ends the first one with status 1, and that ends the rest.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from outrider.lm.lead import Lead, follow
from outrider.lm.packed import PackedLM
from outrider.lm.ranks import Crew, Place, RankLost
from outrider.runtime import gc_freeze
from outrider.runtime.children import ServiceProcess
from outrider.runtime.lifeline import die_with_parent
from outrider.runtime.log import configure
from outrider.runtime.metrics import Metrics
from outrider.runtime.settings import OF_THIS_PROCESS, as_variables
from speculative.errors import InvalidRequest, ModelRefused, OutriderError
from verifier_service.server import VerifierServer
from verifier_service.settings import VerifierSettings

log = logging.getLogger(__name__)

_WATCH_S = 0.2


class LeadingServer(VerifierServer):
    """The verifier as the first of several ranks."""

    def __init__(
        self,
        settings: VerifierSettings,
        place: Place,
        followers: Sequence[ServiceProcess],
        metrics: Metrics,
        fail: Callable[[BaseException], None],
        listener: socket.socket | None = None,
    ) -> None:
        """`listener` is where the other ranks look for this one, if it was opened already."""
        self._place = place
        self._listener = listener
        self._followers = followers
        self._lead: Lead | None = None
        self._lost = fail
        super().__init__(settings, self._load_and_lead, metrics, fail, ranks=place.size)

    async def start(self) -> None:
        """Watches the other ranks from now on, where they are children."""
        self._tasks.append(asyncio.create_task(self._watch(), name="followers"))
        await super().start()

    async def stop(self, grace: float) -> None:
        """Then lets the other ranks end."""
        await super().stop(grace)
        if self._lead is None:
            return
        try:
            await asyncio.to_thread(self._lead.close)
        except RankLost as error:
            self._lost(error)
            await asyncio.sleep(0)

    async def _watch(self) -> None:
        """A child that ends says so sooner than a rank that does not take part."""
        while True:
            await asyncio.sleep(_WATCH_S)
            for follower in self._followers:
                if (status := follower.poll()) is not None:
                    self._lost(
                        RankLost(f"{follower.role} is lost, and all end with it: exit status {status}")
                    )
                    return

    def _load_and_lead(self) -> PackedLM:
        crew = join(self._settings, self._place, self._listener)
        target = load_part(self._settings, crew)
        self._lead = Lead(target, crew, self._lost)
        return target


def place_of(settings: VerifierSettings) -> Place | None:
    """Which rank this process was started as, if as one. Raises InvalidRequest."""
    place = Place.of(os.environ)
    if place is not None and settings.ranks not in (1, place.size):
        raise InvalidRequest(f"ranks = {settings.ranks}, but WORLD_SIZE is {place.size}; give one of them")
    return place


def start_followers(
    settings: VerifierSettings,
) -> tuple[Place, tuple[ServiceProcess, ...], socket.socket]:
    """Makes this process the first of `settings.ranks`, and the others its children. From the main thread.

    Listens where they look for it from now on, so that nobody else takes the port while all load.
    """
    listener = socket.create_server(("127.0.0.1", 0), backlog=settings.ranks)
    host, port = listener.getsockname()
    size = settings.ranks
    common = {"WORLD_SIZE": str(size), "MASTER_ADDR": host, "MASTER_PORT": str(port)}
    os.environ.update(common, RANK="0", LOCAL_RANK="0")
    told = as_variables(settings, without=frozenset({"parent_pid", "config", *OF_THIS_PROCESS}))
    followers = [
        ServiceProcess.start(
            f"rank {rank} of {size}",
            "verifier_service",
            env={**told, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(1, size)
    ]
    return Place(0, size, 0), tuple(followers), listener


def join(settings: VerifierSettings, place: Place, listener: socket.socket | None = None) -> Crew:
    """Raises OutriderError where the ranks do not come together."""
    return Crew.join(place, place.device(settings.device), settings.ranks_timeout_s, listener)


def load_part(settings: VerifierSettings, crew: Crew) -> PackedLM:
    """This rank's part of the settings' model, checked together with the others. Raises OutriderError."""
    try:
        return PackedLM.load(
            settings.model,
            device=crew.place.device(settings.device),
            dtype=settings.dtype,
            threads=settings.threads,
            kv_mb=settings.kv_mb,
            crew=crew,
            deterministic=settings.deterministic,
        )
    except ModelRefused as refusal:
        crew.check_agreed(refusal)
        raise


def run_follower(settings: VerifierSettings, place: Place) -> NoReturn:
    """For the `__main__` of every rank but the first: follows, and ends the process.

    Signals to stop are the first rank's to answer, once there is one to follow.
    """
    if settings.parent_pid is not None:
        die_with_parent(settings.parent_pid)
    configure(f"verifier rank {place.rank}", settings.log_level, settings.log_format)
    code = 1
    crew: Crew | None = None
    try:
        crew = join(settings, place)
        part = load_part(settings, crew)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        gc_freeze.freeze()
        log.info("follows rank 0")
        follow(part, crew)
        log.info("ends, as it was told")
        code = 0
    except RankLost as error:
        log.error("gave up: %s", error)
    except OutriderError as error:
        log.error("gave up: %s", error)
        if crew is not None:
            # The first rank has found the same; were this one gone, it would be stopped before it says so.
            crew.wait_for_the_end()
    except Exception as error:
        log.error("gave up: %s: %s", type(error).__name__, error)
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)
