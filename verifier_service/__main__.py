"""`python -m verifier_service --model PATH`: runs a verifier as a process."""

from functools import partial

from outrider.runtime.serve import ServiceContext, run
from outrider.runtime.settings import settings_or_exit
from verifier_service.server import VerifierServer, load_target
from verifier_service.settings import VerifierSettings


async def build(context: ServiceContext[VerifierSettings]) -> VerifierServer:
    """The service, not yet loaded."""
    settings = context.settings
    return VerifierServer(settings, partial(load_target, settings), context.metrics, context.fail)


if __name__ == "__main__":
    run("verifier", build, settings_or_exit(VerifierSettings))
