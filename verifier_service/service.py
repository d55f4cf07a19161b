"""Puts the verifier together from its settings."""

import os
from functools import partial

from outrider.lm.ranks import Place
from outrider.runtime.serve import ServiceContext
from verifier_service.ranks import LeadingServer
from verifier_service.server import VerifierServer, load_target
from verifier_service.settings import VerifierSettings


async def build(context: ServiceContext[VerifierSettings]) -> VerifierServer:
    """The service, not yet loaded; under torchrun, that of the first rank."""
    settings = context.settings
    place = Place.of(os.environ)
    if place is not None:
        return LeadingServer(settings, place, context.metrics, context.fail)
    return VerifierServer(settings, partial(load_target, settings), context.metrics, context.fail)
