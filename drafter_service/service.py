"""Puts the drafter together from its settings."""

from functools import partial

from drafter_service.drafters import load
from drafter_service.server import DraftSourceServer
from drafter_service.settings import DrafterSettings
from outrider.runtime.serve import ServiceContext


async def build(context: ServiceContext[DrafterSettings]) -> DraftSourceServer:
    """The service, not yet loaded."""
    settings = context.settings
    loading = partial(load, settings)
    return DraftSourceServer(settings, loading, context.metrics, context.fail, context.tracing)
