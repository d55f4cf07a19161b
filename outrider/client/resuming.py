"""Retries a request at another orchestrator: where, when, and from which token.

Pure: knows nothing of connections; the caller passes the time.
"""

import secrets

from outrider.client.completions import CompletionBuilder
from outrider.v1 import generation_pb2
from speculative.errors import OutriderError, Overloaded, Superseded, Unavailable
from speculative.params import SEED_BITS

PAUSE_S = 0.1
"""Seconds before an attempt. The first attempt at another orchestrator after a loss comes at once."""
LASTED_S = 1.0
"""Seconds that an attempt has to last before the next one may come at once: a request that fails as soon as
an orchestrator gets it would otherwise be sent again without end."""


class Resuming:
    """The state of one request across orchestrators, and the choice of the orchestrator to ask next.

    Args:
        request: the message that the user's options make.
        orchestrators: how many orchestrators there are; the request goes to each in turn.
        patience_s: seconds of retries after each loss; 0: no retries.
        first: number of the orchestrator that gets the request first.
        ends: the request's deadline on the clock of `again`; None: no deadline.
        wait_for_ready: whether the request is sent again although no answer has begun, as in gRPC.
    """

    def __init__(
        self,
        request: generation_pb2.GenerateRequest,
        orchestrators: int,
        patience_s: float,
        first: int = 0,
        ends: float | None = None,
        *,
        wait_for_ready: bool = True,
    ) -> None:
        self._wait_for_ready = wait_for_ready
        self._request = generation_pb2.GenerateRequest()
        self._request.CopyFrom(request)
        self._orchestrators = orchestrators
        self._patience_s = patience_s
        self._ends = ends
        self._asked = first % orchestrators
        self._gives_up: float | None = None
        self._sent = -LASTED_S
        """When the request was last sent again, on the clock of `again`."""
        self._slept = False
        """Whether an attempt since the loss was answered so late that the device must have slept."""
        self._resumed = False
        if patience_s > 0:
            # Drawn here, so that a retry is the same request, however far the first attempt had come.
            start = self._request.start
            start.session = start.session or f"c-{secrets.token_hex(8)}"
            if not start.HasField("seed"):
                start.seed = secrets.randbits(SEED_BITS)

    @property
    def request(self) -> generation_pb2.GenerateRequest:
        """The message to send now; after a loss it holds the tokens received so far."""
        return self._request

    @property
    def orchestrator(self) -> int:
        """Number of the orchestrator to send the request to."""
        return self._asked

    def answered(self) -> None:
        """A response came: the next loss starts with all the patience again."""
        self._gives_up = None
        self._slept = False
        self._wait_for_ready = True

    def again(self, error: OutriderError, builder: CompletionBuilder, now: float) -> float | None:
        """Seconds to wait after an error before `request` goes to `orchestrator`; None: the error is final.

        However late a full orchestrator asks for the next attempt: the last one is made when patience or the
        deadline ends.

        Superseded is final, except once after each loss: the orchestrator that was lost may not know of the
        retry, and may have moved the session away from the orchestrator that got the retry.

        An error that comes long after its attempt, because the device slept meanwhile, says nothing of the
        present. So patience then begins anew, once after each loss.
        """
        final = not isinstance(error, Unavailable | Overloaded | Superseded) or not self._patience_s
        if final or not self._wait_for_ready or (isinstance(error, Superseded) and not self._resumed):
            return None
        pause_s = PAUSE_S
        if self._gives_up is None:
            self._gives_up = now + self._patience_s
            if self._orchestrators > 1 and now - self._sent >= LASTED_S:
                pause_s = 0.0
        elif now - self._sent > self._patience_s and not self._slept:
            self._slept, self._gives_up = True, now + self._patience_s
        gives_up = self._gives_up if self._ends is None else min(self._gives_up, self._ends)
        if now >= gives_up:
            return None
        pause_s = min(error.retry_after_s if isinstance(error, Overloaded) else pause_s, gives_up - now)
        self._resumed = not isinstance(error, Superseded)
        self._sent = now + pause_s
        self._asked = (self._asked + 1) % self._orchestrators
        start = self._request.start
        if builder.epoch:
            del start.have[:], start.ended[:]
            start.have.extend(generation_pb2.TokenIds(ids=ids) for ids in builder.have())
            start.ended.extend(builder.ended())
            start.seen_epoch = builder.epoch
        return pause_s
