"""Errors that Outrider reports, by whose fault each is; `outrider.wire` maps them to gRPC status codes.

::

    OutriderError
    ├── InvalidRequest   the caller's fault: a value is out of range, and the message names it
    ├── StaleEpoch       the caller speaks for an older incarnation of the session
    ├── IdsNeeded        the prefix that the caller names by a hash is not known here: send the ids
    ├── UnknownModel     no such model here
    ├── UnknownSession   no such session here
    ├── Superseded       a later request took over the session
    ├── Unauthenticated  the caller's credentials are missing or not known
    ├── PermissionDenied the caller is known, and may not do this
    ├── Overloaded       full: try again later
    │   └── QuotaExceeded  the caller's own share is used up: try again later
    ├── Unavailable      no peer can serve this now: try elsewhere
    │   └── DeadlineExceeded  the time limit of the request is over
    ├── MalformedDraft   a source broke the contract: its draft is dropped and counted, the session goes on
    ├── ModelRefused     the model would be served wrongly, so it is not served
    └── EmptySupport     the target's logits leave no token to choose
        └── DeadEnd        the request's grammar leaves none, or grew too large: the caller's fault
"""


class OutriderError(Exception):
    """Any failure that Outrider itself reports; its text says what was wrong and what to do."""


class InvalidRequest(OutriderError):
    """A value of the request is out of range; the message names the field and the value."""


class StaleEpoch(OutriderError):
    """The caller's epoch is older than the session's.

    `highest` is the highest epoch of the session known here, so that the caller can choose a higher one.
    """

    def __init__(self, message: str, highest: int) -> None:
        super().__init__(message)
        self.highest = highest


class IdsNeeded(OutriderError):
    """The prefix that the caller names by length and hash is not known here; the ids have to be sent."""


class UnknownModel(OutriderError):
    """This process does not serve the model that the caller names."""


class UnknownSession(OutriderError):
    """This process does not know the session that the caller names."""


class Superseded(OutriderError):
    """A later request took over the session."""


class Overloaded(OutriderError):
    """There is no capacity now; `retry_after_s` is the time until a retry makes sense, in seconds."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QuotaExceeded(Overloaded):
    """The caller's own quota is used up for now; other callers are served."""


class Unauthenticated(OutriderError):
    """The caller's credentials are missing or unknown; the message says what to send, not what was sent."""


class PermissionDenied(OutriderError):
    """The caller is known, but may not do this or may not see what belongs to another tenant."""


class Unavailable(OutriderError):
    """No peer that could serve this can be reached; trying elsewhere or later may help."""


class DeadlineExceeded(Unavailable):
    """The time limit of the request is over; the message says what the request was waiting for."""


class MalformedDraft(OutriderError):
    """A draft that no correct source sends. The verifier drops and counts it; the session goes on."""


class ModelRefused(OutriderError):
    """The model would be served wrongly; `model_type` is its transformers model type."""

    def __init__(self, message: str, model_type: str) -> None:
        super().__init__(message)
        self.model_type = model_type


class EmptySupport(OutriderError):
    """The target's logits hold NaN or infinity, or they and the grammar leave no token to choose."""


class DeadEnd(EmptySupport):
    """The request's grammar allows no token after the text so far, or needs more states than allowed."""
