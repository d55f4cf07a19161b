"""One request as the orchestrator sees it: what its client has been given.

Pure: knows nothing of connections; the caller feeds what the verifier committed and sends on what comes out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.v1 import common_pb2
from speculative.commit import FinishReason
from speculative.text import TextStream


@dataclass(frozen=True, slots=True)
class Delta:
    """What the client does not have yet."""

    position: int
    """Absolute position of the first id."""
    ids: tuple[int, ...]
    credits: bytes
    """One byte per id: the index of its source, 0 for the target itself."""
    text: str
    logprobs: tuple[common_pb2.TokenLogprob, ...] = ()
    """One per id where the request asked for them."""


class Delivery:
    """The client's cursor and text. Ids are given once and in order, whatever the verifier sends twice."""

    def __init__(self, prompt_length: int, text: TextStream | None) -> None:
        self.position = prompt_length
        """Ids that the client has, prompt included."""
        self._text = text

    def take(
        self,
        position: int,
        ids: tuple[int, ...],
        credits: bytes,
        logprobs: Sequence[common_pb2.TokenLogprob] = (),
    ) -> Delta | None:
        """What of these ids is new; None where nothing is.

        `logprobs` are those of the last ids, or none at all.

        Raises ValueError where they do not join what the client has, or have no credit each.
        """
        if position > self.position:
            raise ValueError(f"committed ids start at {position}, but the client has {self.position}")
        if len(credits) != len(ids):
            raise ValueError(f"{len(ids)} committed ids came with {len(credits)} credits")
        known = self.position - position
        fresh = ids[known:]
        if not fresh:
            return None
        told = tuple(logprobs[max(0, len(logprobs) - len(fresh)) :])
        if told and len(told) < len(fresh):
            raise ValueError(f"{len(fresh)} committed ids came with {len(told)} logprobs")
        text = self._text.push(fresh) if self._text is not None else ""
        delta = Delta(self.position, fresh, credits[known:], text, told)
        self.position += len(fresh)
        return delta

    def finish(self, reason: FinishReason) -> str:
        """Text that was held back and turned out to be no stop string."""
        return self._text.finish(reason) if self._text is not None else ""
