"""Puts the verifier together from its settings."""

from functools import partial

from outrider.runtime.serve import ServiceContext
from verifier_service.server import VerifierServer, load_target
from verifier_service.settings import VerifierSettings


async def build(context: ServiceContext[VerifierSettings]) -> VerifierServer:
    """The service, not yet loaded."""
    settings = context.settings
    return VerifierServer(settings, partial(load_target, settings), context.metrics, context.fail)
