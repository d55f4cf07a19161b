"""The delivery of one request to its client: the events of the answer, and the tokens of each choice.

Pure: knows nothing of connections. The caller feeds what verifiers commit, and sends on what comes out.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.v1 import common_pb2
from speculative.stop import FinishReason
from speculative.text import TextStream


@dataclass(frozen=True, slots=True)
class Delta:
    """Tokens of a choice that the client does not have yet."""

    position: int
    """Absolute position of the first token."""
    ids: tuple[int, ...]
    token_sources: bytes
    """One byte per token: the index of its source, 0 for the target itself."""
    text: str
    logprobs: tuple[common_pb2.TokenLogprob, ...] = ()
    """One entry per token where the request asked for log-probabilities; else empty."""


@dataclass(frozen=True, slots=True)
class Started:
    """All choices of a request are open."""

    epoch: int
    source_names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Delivered:
    """Event: a choice has new tokens for the client."""

    choice: int
    delta: Delta
    epoch: int


@dataclass(frozen=True, slots=True)
class PromptScored:
    """Event: tokens of the prompt have their log-probabilities, in the order of the prompt."""

    choice: int
    logprobs: tuple[common_pb2.TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Recovered:
    """The verifier was lost and another has the choices. The client hears nothing of this event."""

    silent_s: float
    """Seconds from the loss until all choices were open again."""


@dataclass(frozen=True, slots=True)
class Finished:
    """Event: a choice has ended."""

    choice: int
    reason: FinishReason
    usage: common_pb2.Usage
    text: str
    """Text that was held back as a possible stop string and is none."""
    message: str
    code: int = 0
    """As in the contract's Committed.code."""


Event = Started | PromptScored | Delivered | Recovered | Finished


@dataclass(slots=True)
class PlacementCost:
    """Cost of a choice on one verifier, as far as the verifier has reported."""

    rounds: int = 0
    admitted: int = 0
    tokens: int = 0
    accepted: Counter[int] = field(default_factory=Counter)
    """Accepted tokens by source index."""

    def add(self, other: "PlacementCost") -> None:
        """Add the cost on another verifier."""
        self.rounds += other.rounds
        self.admitted += other.admitted
        self.tokens += other.tokens
        self.accepted.update(other.accepted)


class Delivery:
    """The tokens that the client has of one choice: each once and in order, whatever verifiers send twice.

    Args:
        prompt_length: number of tokens of the prompt.
        text: turns generated tokens into text; None: the client is sent token ids alone.
        have: generated token ids that the client has from an earlier stream.
        score: whether the prompt's tokens come, too, with their log-probabilities.
    """

    def __init__(
        self, prompt_length: int, text: TextStream | None, have: Sequence[int] = (), *, score: bool = False
    ) -> None:
        self.ids = list(have)
        """Generated token ids that the client has."""
        self._scored = 1 if score else prompt_length  # nothing comes before the first token to score it
        self._prompt_length = prompt_length
        self._text = text
        self._here = PlacementCost()
        self._before = PlacementCost()
        self._recoveries = 0
        if text is not None:
            text.push(have)

    @property
    def position(self) -> int:
        """Number of tokens that the client has, prompt included; fewer until the prompt is scored."""
        return self._scored + len(self.ids)

    @property
    def scoring(self) -> bool:
        """Whether tokens of the prompt are still to be scored."""
        return self._scored < self._prompt_length

    def take_scores(
        self, position: int, logprobs: Sequence[common_pb2.TokenLogprob]
    ) -> tuple[common_pb2.TokenLogprob, ...]:
        """Log-probabilities of the prompt's tokens among committed ones, as far as they are new.

        Raises ValueError where they leave a gap.

        Args:
            position: absolute position of the first token; below the prompt's end.
        """
        if position > self._scored:
            raise ValueError(f"scores start at {position}, but the client has {self._scored}")
        fresh = tuple(logprobs[self._scored - position : self._prompt_length - position])
        self._scored += len(fresh)
        return fresh

    def take(
        self,
        position: int,
        ids: tuple[int, ...],
        token_sources: bytes,
        logprobs: Sequence[common_pb2.TokenLogprob] = (),
    ) -> Delta | None:
        """The tokens among these that are new to the client; None where none is.

        Raises ValueError where they leave a gap after the client's last token, or lack a source index each.

        Args:
            position: absolute position of the first token.
            logprobs: log-probabilities of the last tokens, or none at all.
        """
        if position > self.position:
            raise ValueError(f"committed ids start at {position}, but the client has {self.position}")
        if len(token_sources) != len(ids):
            raise ValueError(f"{len(ids)} committed ids came with {len(token_sources)} token_sources")
        known = self.position - position
        fresh = ids[known:]
        if not fresh:
            return None
        fresh_logprobs = tuple(logprobs[max(0, len(logprobs) - len(fresh)) :])
        if fresh_logprobs and len(fresh_logprobs) < len(fresh):
            raise ValueError(f"{len(fresh)} committed ids came with {len(fresh_logprobs)} logprobs")
        text = self._text.push(fresh) if self._text is not None else ""
        delta = Delta(self.position, fresh, token_sources[known:], text, fresh_logprobs)
        self.ids += fresh
        self._here.tokens += len(fresh)
        self._here.accepted.update(source_index for source_index in delta.token_sources if source_index)
        return delta

    def costs(self, rounds: int, admitted: int) -> None:
        """Set the choice's cost on its present verifier so far."""
        self._here.rounds, self._here.admitted = rounds, admitted

    def lost(self) -> None:
        """The choice leaves its verifier. The tokens from there stand, and their cost counts."""
        self._before.add(self._here)
        self._here = PlacementCost()
        self._recoveries += 1

    def usage(self, last: common_pb2.Usage, source_names: Sequence[str]) -> common_pb2.Usage:
        """The usage of the choice on all its verifiers, `last` being the report of the last one."""
        whole, before = common_pb2.Usage(), self._before
        whole.CopyFrom(last)
        whole.rounds += before.rounds
        whole.admitted += before.admitted
        whole.completion_tokens += before.tokens
        for source_index, count in before.accepted.items():
            whole.accepted_by_source[source_names[source_index - 1]] += count
        whole.recoveries = self._recoveries
        return whole

    def finish(self, reason: FinishReason) -> str:
        """The text held back that turned out to be no stop string; called at the end of a choice."""
        return self._text.finish(reason) if self._text is not None else ""
