"""What becomes of an admitted request, as its client is told."""

from dataclasses import dataclass

from orchestrator.relay.delivery import Delta
from outrider.v1 import common_pb2
from speculative.commit import FinishReason


@dataclass(frozen=True, slots=True)
class Started:
    """All choices are open."""

    epoch: int
    source_names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Delivered:
    """A choice has more."""

    choice: int
    delta: Delta
    epoch: int


@dataclass(frozen=True, slots=True)
class Recovered:
    """The verifier was lost and another has the choices; nothing of this goes to the client."""

    silent_s: float
    """From the loss until all were open again."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A choice has ended."""

    choice: int
    reason: FinishReason
    usage: common_pb2.Usage
    text: str
    """What was held back and is no stop string."""
    message: str


Event = Started | Delivered | Recovered | Finished
