"""Tensor parallelism: a verifier of several processes, each with a shard of the target.

The first rank is the verifier; the others run its passes (`outrider.lm.parallel.leader`) and have no gRPC,
clock or scheduler. All ranks end together: the loss of any rank ends the first one with status 1,
which ends the rest.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from pydantic import ValidationError

from outrider.lm.device.placement import kv_mb_of
from outrider.lm.parallel.leader import Leader, follow_leader
from outrider.lm.parallel.rank_group import RankGroup, RankInfo, RankLost
from outrider.lm.runner import PackedLM
from outrider.runtime.children import ServiceProcess
from outrider.runtime.lifeline import die_with_parent
from outrider.runtime.log import configure
from outrider.runtime.metrics import Metrics
from outrider.runtime.settings import OF_THIS_PROCESS, as_variables
from outrider.runtime.stalls import gc_pauses
from speculative.errors import InvalidRequest, ModelRefused, OutriderError
from verifier_service.loading import gpu_options, threads_of
from verifier_service.proposers.batched import all_needs, guest_room
from verifier_service.proposers.planning import plan_proposers
from verifier_service.server import VerifierServer
from verifier_service.settings import VerifierSettings

log = logging.getLogger(__name__)

_WATCH_S = 0.2


class LeadingServer(VerifierServer):
    """The verifier as the first of several ranks.

    Args:
        settings: of the process.
        rank: this process's place among the ranks.
        followers: the other ranks that are children of this process; empty under torchrun.
        metrics: the process's metrics.
        fail: called with the error that ended the engine's thread or lost a rank.
        listener: where the other ranks connect to this one; None: it is opened on joining.
    """

    def __init__(
        self,
        settings: VerifierSettings,
        rank: RankInfo,
        followers: Sequence[ServiceProcess],
        metrics: Metrics,
        fail: Callable[[BaseException], None],
        listener: socket.socket | None = None,
    ) -> None:
        self._rank = rank
        self._listener = listener
        self._followers = followers
        self._lead: Leader | None = None
        self._lost = fail
        super().__init__(settings, self._load_and_lead, metrics, fail, ranks=rank.size)

    async def start(self) -> None:
        """Starts the verifier, and watches the ranks that are children of this process."""
        self._tasks.append(asyncio.create_task(self._watch(), name="followers"))
        await super().start()

    async def stop(self, grace: float) -> None:
        """Stops the verifier, and then lets the other ranks end."""
        await super().stop(grace)
        if self._lead is None:
            return
        try:
            await asyncio.to_thread(self._lead.close)
        except RankLost as error:
            self._lost(error)
            await asyncio.sleep(0)

    async def _watch(self) -> None:
        """Notices the end of a child sooner than a pass would that waits for the child's part."""
        while True:
            await asyncio.sleep(_WATCH_S)
            for follower in self._followers:
                if (status := follower.poll()) is not None:
                    self._lost(
                        RankLost(f"{follower.role} is lost, and all end with it: exit status {status}")
                    )
                    return

    def _load_and_lead(self) -> PackedLM:
        group = _join(self._settings, self._rank, self._listener)
        target = _load_shard(self._settings, group)
        self._lead = Leader(target, group, self._lost)
        return target


def rank_from_environment(settings: VerifierSettings) -> RankInfo | None:
    """The rank that torchrun, or the first rank, started this process as; None: the process is no rank.

    Raises InvalidRequest where the environment contradicts itself or the settings.
    """
    rank = RankInfo.of(os.environ)
    if rank is not None and settings.ranks not in (1, rank.size):
        raise InvalidRequest(f"ranks = {settings.ranks}, but WORLD_SIZE is {rank.size}; give one of them")
    return rank


def settings_of_rank(settings: VerifierSettings, rank: RankInfo) -> VerifierSettings:
    """The settings with the number of ranks, which torchrun gives in the environment alone.

    Raises InvalidRequest for a setting that so many ranks do not serve.
    """
    # torchrun's OMP_NUM_THREADS is that of one rank, whatever the number of ranks.
    known = {"ranks": rank.size, "threads": threads_of(settings)}
    try:
        return VerifierSettings.model_validate({**dict(settings), **known})
    except ValidationError as error:
        raise InvalidRequest(error.errors()[0]["msg"].removeprefix("Value error, ")) from None


def start_followers(
    settings: VerifierSettings,
) -> tuple[RankInfo, tuple[ServiceProcess, ...], socket.socket]:
    """Makes this process the first of `settings.ranks`, and starts the others as its children.

    Returns this process's place, the children, and the socket to which they will connect: it listens from now
    on, so that no other process takes the port while the ranks load. Only for the main thread, with which the
    children end.
    """
    listener = socket.create_server(("127.0.0.1", 0), backlog=settings.ranks)
    host, port = listener.getsockname()
    size = settings.ranks
    common = {"WORLD_SIZE": str(size), "MASTER_ADDR": host, "MASTER_PORT": str(port)}
    os.environ.update(common, RANK="0", LOCAL_RANK="0")
    variables = as_variables(settings, without=frozenset({"parent_pid", "config", *OF_THIS_PROCESS}))
    followers = [
        ServiceProcess.start(
            f"rank {rank} of {size}",
            "verifier_service",
            env={**variables, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(1, size)
    ]
    return RankInfo(0, size, 0), tuple(followers), listener


def run_follower(settings: VerifierSettings, rank: RankInfo) -> NoReturn:
    """Runs any rank but the first until the verifier ends, and ends the process. For `__main__`.

    Once this rank follows, it ignores signals to stop: the first rank answers them.
    """
    if settings.parent_pid is not None:
        die_with_parent(settings.parent_pid)
    configure(f"verifier rank {rank.rank}", settings.log_level, settings.log_format)
    code = 1
    group: RankGroup | None = None
    try:
        group = _join(settings, rank)
        shard = _load_shard(settings_of_rank(settings, rank), group)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        gc_pauses.freeze()
        log.info("follows rank 0")
        follow_leader(shard, group)
        log.info("ends with rank 0")
        code = 0
    except RankLost as error:
        log.error("gave up: %s", error)
    except OutriderError as error:
        log.error("gave up: %s", error)
        if group is not None:
            # The first rank has found the same fault. If this rank ended now, the first one would be stopped
            # before it can report the fault.
            group.wait_for_the_end()
    except Exception as error:
        log.error("gave up: %s: %s", type(error).__name__, error)
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)


def _join(settings: VerifierSettings, rank: RankInfo, listener: socket.socket | None = None) -> RankGroup:
    """Connects this rank with the others. Raises OutriderError where they do not come together."""
    return RankGroup.join(rank, rank.device(settings.device), settings.ranks_timeout_s, listener)


def _load_shard(settings: VerifierSettings, group: RankGroup) -> PackedLM:
    """Loads this rank's shard of the target, and checks it together with the others. Raises OutriderError."""
    try:
        plans = plan_proposers(settings)
        return PackedLM.load(
            settings.model,
            device=group.info.device(settings.device),
            dtype=settings.dtype,
            threads=threads_of(settings),
            kv_mb=kv_mb_of(settings.kv_mb),
            rank_group=group,
            deterministic=settings.deterministic,
            guest=guest_room(plans.values()),
            whole=all_needs(plans.values()).parts,
            gpu=gpu_options(settings),
            weight_dtype=settings.weight_dtype,
            int8_kv=settings.kv_dtype == "int8",
        )
    except ModelRefused as refusal:
        group.check_agreed(refusal)
        raise
