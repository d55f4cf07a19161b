"""What every worker can be told beside what every process can: with whom it registers."""

from functools import partial
from typing import Annotated, ClassVar

from pydantic import AfterValidator

from outrider.runtime.settings import Peers, ServiceSettings, checked_address

Reached = Annotated[str, AfterValidator(partial(checked_address, lowest=1))]


class WorkerSettings(ServiceSettings):
    """Base of the settings of verifier, drafter and retrieval."""

    role: ClassVar[str] = "worker"

    register_with: Peers = ()
    """Orchestrators' --registry-bind, host:port or dns:NAME:PORT, separated by commas: they use this worker
    without having been told of it, and hand its sessions over when it ends. Default: none."""
    advertise: Reached | None = None
    """host:port at which orchestrators and verifiers reach this worker. Default: where it is bound."""


OF_THIS_PROCESS = frozenset({"register_with", "advertise"})
"""What is of no concern to further processes of the same worker."""
