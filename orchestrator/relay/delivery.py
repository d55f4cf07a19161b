"""One request as the orchestrator sees it: what its client has been given.

Pure: knows nothing of connections; the caller feeds what the verifier committed and sends on what comes out.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

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


@dataclass(slots=True)
class Cost:
    """What a placement has cost, as far as it was told."""

    rounds: int = 0
    admitted: int = 0
    tokens: int = 0
    accepted: Counter[int] = field(default_factory=Counter)
    """Accepted ids by credit index."""

    def add(self, other: "Cost") -> None:
        """The other comes on top."""
        self.rounds += other.rounds
        self.admitted += other.admitted
        self.tokens += other.tokens
        self.accepted.update(other.accepted)


class Delivery:
    """What one choice's client has: ids are given once and in order, whatever verifiers send twice.

    Args:
        prompt_length: ids of the prompt.
        text: of the generated ids; None: ids alone are told.
        have: generated ids that the client has from an earlier stream.
    """

    def __init__(self, prompt_length: int, text: TextStream | None, have: Sequence[int] = ()) -> None:
        self.ids = list(have)
        """Generated ids that the client has."""
        self._prompt_length = prompt_length
        self._text = text
        self._here = Cost()
        self._before = Cost()
        self._recoveries = 0
        if text is not None:
            text.push(have)

    @property
    def position(self) -> int:
        """Ids that the client has, prompt included."""
        return self._prompt_length + len(self.ids)

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
        self.ids += fresh
        self._here.tokens += len(fresh)
        self._here.accepted.update(credit for credit in delta.credits if credit)
        return delta

    def costs(self, rounds: int, admitted: int) -> None:
        """What the placement has cost so far."""
        self._here.rounds, self._here.admitted = rounds, admitted

    def lost(self) -> None:
        """The placement is gone. What it committed stands, and what it cost counts."""
        self._before.add(self._here)
        self._here = Cost()
        self._recoveries += 1

    def usage(self, last: common_pb2.Usage, source_names: Sequence[str]) -> common_pb2.Usage:
        """What the choice cost in all, `last` being what its last verifier says."""
        whole, before = common_pb2.Usage(), self._before
        whole.CopyFrom(last)
        whole.rounds += before.rounds
        whole.admitted += before.admitted
        whole.completion_tokens += before.tokens
        for credit, count in before.accepted.items():
            whole.accepted_by_source[source_names[credit - 1]] += count
        whole.recoveries = self._recoveries
        return whole

    def finish(self, reason: FinishReason) -> str:
        """Text that was held back and turned out to be no stop string."""
        return self._text.finish(reason) if self._text is not None else ""
