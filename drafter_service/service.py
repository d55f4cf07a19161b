"""Puts the drafter together from its settings."""

from functools import partial

from drafter_service.drafters import load
from drafter_service.server import DraftSourceServer
from drafter_service.settings import DrafterSettings
from outrider.announcing import announced
from outrider.runtime.serve import Service, ServiceContext


async def build(context: ServiceContext[DrafterSettings]) -> Service:
    """The service, not yet loaded."""
    settings = context.settings
    loading = partial(load, settings)
    server = DraftSourceServer(settings, loading, context.metrics, context.fail, context.tracing)
    return announced(server, context, waits=True)
