"""`python -m drafter_service --model PATH`: runs a drafter as a process."""

from functools import partial

from drafter_service.drafters import load
from drafter_service.server import DraftSourceServer
from drafter_service.settings import DrafterSettings
from outrider.runtime.serve import ServiceContext, run
from outrider.runtime.settings import settings_or_exit


async def build(context: ServiceContext[DrafterSettings]) -> DraftSourceServer:
    """The service, not yet loaded."""
    settings = context.settings
    return DraftSourceServer(settings, partial(load, settings), context.metrics, context.fail)


if __name__ == "__main__":
    run("drafter", build, settings_or_exit(DrafterSettings))
