"""What can go wrong, by whose fault it is; knows nothing of gRPC (`outrider.wire` maps each to a status).

::

    OutriderError
    ├── InvalidRequest   the caller's fault: a value is out of range, and the message names it
    ├── StaleEpoch       the caller speaks for an older incarnation of the session
    ├── IdsNeeded        what the caller names by a hash is not known here: it has to send the ids
    ├── UnknownModel     no such model here
    ├── UnknownSession   no such session here
    ├── Superseded       a later request took over the session
    ├── Unauthenticated  the caller did not say who it is, or not so that it is believed
    ├── PermissionDenied the caller is known, and may not do this
    ├── Overloaded       full: try again later
    │   └── QuotaExceeded  the caller's own share is used up: try again later
    ├── Unavailable      nobody can serve this now: try elsewhere
    ├── MalformedDraft   a source broke the contract: its draft is dropped and counted, the session goes on
    ├── ModelRefused     this model would be served wrongly, so it is not served
    └── EmptySupport     the target's logits, or the request's grammar, leave no token to choose
"""


class OutriderError(Exception):
    """Any failure that Outrider itself reports; `str()` says what was wrong and what to do."""


class InvalidRequest(OutriderError):
    """A value of the request is out of range; the message names the field and the value."""


class StaleEpoch(OutriderError):
    """The caller's epoch is older than one already seen.

    `highest` is the highest epoch known here, so that the caller can go above it.
    """

    def __init__(self, message: str, highest: int) -> None:
        super().__init__(message)
        self.highest = highest


class IdsNeeded(OutriderError):
    """What the caller names by number and hash is not known here; the same with the ids will do."""


class UnknownModel(OutriderError):
    """No such model is served here."""


class UnknownSession(OutriderError):
    """No such session is known here."""


class Superseded(OutriderError):
    """A later request took over the session."""


class Overloaded(OutriderError):
    """There is no room now; `retry_after_s` is when to try again, in seconds."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QuotaExceeded(Overloaded):
    """What this caller may use is used up for now; others are served."""


class Unauthenticated(OutriderError):
    """Nobody is known by what the caller shows; the message says what to show, and never what was shown."""


class PermissionDenied(OutriderError):
    """The caller is known, and what it asks for is another's."""


class Unavailable(OutriderError):
    """Nobody who could serve this can be reached; trying elsewhere or later may help."""


class MalformedDraft(OutriderError):
    """A draft that no correct source sends. It is dropped and counted; it never fails a session."""


class ModelRefused(OutriderError):
    """The model would be served wrongly; `model_type` is the transformers model type."""

    def __init__(self, message: str, model_type: str) -> None:
        super().__init__(message)
        self.model_type = model_type


class EmptySupport(OutriderError):
    """The target's logits hold NaN or infinity, or they and the grammar leave no token to choose."""
