"""Builds the verifier from its settings."""

from collections.abc import Sequence
from functools import partial

from outrider.announcing import announced
from outrider.lm.load.progress import follow_loading
from outrider.runtime.children import ServiceProcess
from outrider.runtime.serve import Service, ServiceContext
from verifier_service.loading import load_target
from verifier_service.parallel import (
    LeadingServer,
    rank_from_environment,
    settings_of_rank,
    start_followers,
)
from verifier_service.server import VerifierServer
from verifier_service.settings import VerifierSettings


async def build(context: ServiceContext[VerifierSettings]) -> Service:
    """The verifier, not loaded yet; of a verifier of several processes, the first rank."""
    settings = context.settings
    follow_loading(context.loaded)
    rank = rank_from_environment(settings)
    if rank is not None:
        settings = settings_of_rank(settings, rank)
    server: VerifierServer
    if rank is None and settings.ranks == 1:
        server = VerifierServer(settings, partial(load_target, settings), context.metrics, context.fail)
    else:
        followers: Sequence[ServiceProcess] = ()
        listener = None
        if rank is None:
            rank, followers, listener = start_followers(settings)
        server = LeadingServer(settings, rank, followers, context.metrics, context.fail, listener)
    server.tracing = context.tracing
    return announced(server, context)
