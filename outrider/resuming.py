"""A request whose orchestrator is lost, asked again of another: where, when, and with what the client has.

Pure: knows nothing of connections; the caller says the time.
"""

import secrets

from outrider.completions import Folding
from outrider.v1 import generation_pb2
from speculative.errors import OutriderError, Overloaded, Superseded, Unavailable

PAUSE_S = 0.1


class Resuming:
    """One request and the orchestrators that it may go to.

    Args:
        request: as the user asked it.
        orchestrators: how many there are; each is asked in turn.
        patience_s: how long it is asked again after each loss; 0: never.
        first: number of the orchestrator that is asked first.
        ends: when the request's time is over, on the clock of `again`; None: never.
    """

    def __init__(
        self,
        request: generation_pb2.GenerateRequest,
        orchestrators: int,
        patience_s: float,
        first: int = 0,
        ends: float | None = None,
    ) -> None:
        self._request = generation_pb2.GenerateRequest()
        self._request.CopyFrom(request)
        self._orchestrators = orchestrators
        self._patience_s = patience_s
        self._ends = ends
        self._asked = first % orchestrators
        self._gives_up: float | None = None
        self._resumed = False
        if patience_s > 0:
            # Drawn here, so that a request that is asked again is the same one wherever it had come to.
            start = self._request.start
            start.session = start.session or f"c-{secrets.token_hex(8)}"
            if not start.HasField("seed"):
                start.seed = secrets.randbits(64)

    @property
    def request(self) -> generation_pb2.GenerateRequest:
        """What is asked."""
        return self._request

    @property
    def orchestrator(self) -> int:
        """The number of the one to ask."""
        return self._asked

    def answered(self) -> None:
        """Something came: the next loss has all the patience again."""
        self._gives_up = None

    def again(self, error: OutriderError, folding: Folding, now: float) -> float | None:
        """After an error: seconds to wait before `request` goes to `orchestrator`; None where it is final.

        To be taken over is final, but once after each loss: the orchestrator that was lost may not have heard
        of it, and have moved the session elsewhere, away from the one that was asked next.
        """
        final = not isinstance(error, Unavailable | Overloaded | Superseded) or not self._patience_s
        if final or (isinstance(error, Superseded) and not self._resumed):
            return None
        if self._gives_up is None:
            self._gives_up = now + self._patience_s
        if now >= self._gives_up or (self._ends is not None and now >= self._ends):
            return None
        self._resumed = not isinstance(error, Superseded)
        self._asked = (self._asked + 1) % self._orchestrators
        start = self._request.start
        if folding.epoch:
            del start.have[:], start.ended[:]
            start.have.extend(generation_pb2.TokenIds(ids=ids) for ids in folding.have())
            start.ended.extend(folding.ended())
            start.seen_epoch = folding.epoch
        return error.retry_after_s if isinstance(error, Overloaded) else PAUSE_S
