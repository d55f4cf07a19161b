"""Puts the drafter together from its settings."""

from functools import partial

from drafter_service.drafters import load
from drafter_service.server import DraftSourceServer
from drafter_service.settings import DrafterSettings
from outrider.runtime.serve import ServiceContext


async def build(context: ServiceContext[DrafterSettings]) -> DraftSourceServer:
    """The service, not yet loaded."""
    settings = context.settings
    return DraftSourceServer(settings, partial(load, settings), context.metrics, context.fail)
