"""What all sessions together have taught about each source, by the kind of request."""

from dataclasses import dataclass, field
from threading import Lock

from speculative.calibration import Calibration
from speculative.params import SamplingParams
from verifier_service.asking import Record

# Clients name sources, so their number is theirs to choose; the oldest goes.
_MOST = 512
_BAND = 0.4
_BANDS = 3


@dataclass(frozen=True, slots=True)
class Reputation:
    """Of one source, for requests of one kind."""

    calibration: Calibration = field(default_factory=Calibration)
    record: Record = field(default_factory=Record)


class Reputations:
    """By source name and temperature: a copied token is followed far less often when sampling."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], Reputation] = {}
        self._lock = Lock()

    def of(self, name: str, params: SamplingParams) -> Reputation:
        """The one of this source with such requests; from any thread."""
        band = 0 if params.greedy else 1 + min(int(params.temperature / _BAND), _BANDS)
        with self._lock:
            found = self._known.get((name, band))
            if found is None:
                if len(self._known) >= _MOST:
                    del self._known[next(iter(self._known))]
                found = self._known[name, band] = Reputation()
            return found
