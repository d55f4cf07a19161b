"""Puts the verifier together from its settings."""

from collections.abc import Sequence
from functools import partial

from outrider.announcing import announced
from outrider.runtime.children import ServiceProcess
from outrider.runtime.serve import Service, ServiceContext
from verifier_service.loading import load_target
from verifier_service.ranks import LeadingServer, place_of, start_followers
from verifier_service.server import VerifierServer
from verifier_service.settings import VerifierSettings


async def build(context: ServiceContext[VerifierSettings]) -> Service:
    """The service, not yet loaded; of several ranks, that of the first."""
    settings = context.settings
    place = place_of(settings)
    server: VerifierServer
    if place is None and settings.ranks == 1:
        server = VerifierServer(settings, partial(load_target, settings), context.metrics, context.fail)
        server.tracing = context.tracing
        return announced(server, context)
    followers: Sequence[ServiceProcess] = ()
    listener = None
    if place is None:
        place, followers, listener = start_followers(settings)
    server = LeadingServer(settings, place, followers, context.metrics, context.fail, listener)
    server.tracing = context.tracing
    return announced(server, context)
