"""The messages between the event loop and the engine: commands in, one report per step out.

A session is named by its handle, a number that no two incarnations share. Knows nothing of sockets or
tensors.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from speculative.fragment import Fragment
from speculative.logprobs import TokenLogprob
from speculative.observed import Observed
from speculative.stats import UsageCount
from speculative.stop import FinishReason
from verifier_service.observe.round_log import RoundRecord
from verifier_service.sessions.request import SourceSet

if TYPE_CHECKING:
    from verifier_service.engine.session import Session
    from verifier_service.proposers.batched import BatchedProposer


@dataclass(frozen=True, slots=True)
class Open:
    """Starts a session; the engine owns it from here on."""

    session: "Session"


@dataclass(frozen=True, slots=True)
class Cancel:
    """Ends a session when the step in flight has ended."""

    handle: int
    message: str = ""


@dataclass(frozen=True, slots=True)
class Park:
    """Stops decoding a session and frees its memory; a reader that comes back has it opened anew."""

    handle: int


@dataclass(frozen=True, slots=True)
class Sources:
    """Changes the sources that draft for a session."""

    handle: int
    sources: SourceSet


@dataclass(frozen=True, slots=True)
class Observe:
    """A session's source wants to know what the target says at the rows that it computes."""

    handle: int
    source: int
    """The source's index in the session."""
    tops: int
    """How many of the target's likeliest ids the source wants of each row, 0 to 32."""


@dataclass(frozen=True, slots=True)
class WaitFor:
    """A message of a session's source that asks rounds to wait for its drafts, or to stop waiting."""

    handle: int
    source: int
    """The source's index in the session."""
    ms: int
    """Milliseconds after a round until the next round begins without a draft; 0: at once."""


NODES_OF_A_DRAFT = 32
"""Nodes that count as one more draft: the time to merge a draft grows with its nodes."""


def load_of(drafts: Sequence[tuple[int, Fragment]]) -> int:
    """What drafts, each with its session's handle, count for in the bound of their link."""
    return sum([1 + len(fragment) // NODES_OF_A_DRAFT for _, fragment in drafts])


@dataclass(slots=True)
class InFlight:
    """Counts the drafts of one link that the engine has not taken yet. The loop adds, the engine takes.

    A draft counts for as much as `load_of` says.
    """

    put: int = 0
    taken: int = 0

    @property
    def count(self) -> int:
        """Drafts in the inbox, or merged during the pass that is computed; read by the loop."""
        return self.put - self.taken


@dataclass(frozen=True, slots=True)
class Offers:
    """The drafts of one message of a source: pairs of session handle and fragment."""

    drafts: tuple[tuple[int, Fragment], ...]
    arrived_s: float
    """When the message came in, on the clock of time.perf_counter."""
    in_flight: InFlight


@dataclass(frozen=True, slots=True)
class SwapProposer:
    """Has another proposer draft in the place of one of the same needs, between two passes."""

    name: str
    """Source name of the proposer that drafts so far."""
    proposer: "BatchedProposer"
    before: "Future[BatchedProposer]"
    """Gets the proposer that drafted so far, ValueError where nothing was changed, or the error that ends the
    engine; may be cancelled."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Command: end the engine's thread."""


Command = Open | Cancel | Park | Sources | Observe | WaitFor | Offers | SwapProposer | Stop


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of a session: its reason, and an error if there was one."""

    reason: FinishReason
    usage: UsageCount
    message: str = ""
    code: int = 0
    """As in the contract's Committed.code."""


class Update(NamedTuple):
    """Tokens that one step committed of one session, and the session's end if it ended."""

    handle: int
    position: int
    """Absolute position of the first committed token."""
    ids: tuple[int, ...]
    token_sources: bytes
    """One byte per token: 0 the target itself, k the session's source k - 1."""
    prefix_hash: int
    """Hash of all ids up to and including these."""
    finish: Finish | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    """One per token where the request asked for them."""
    resting: frozenset[int] = frozenset()
    """Resting sources, by source index: they are not sent this update."""
    rounds: int = 0
    """Rounds of the session so far."""
    admitted: int = 0
    """Drafted nodes that these rounds computed."""
    parked: UsageCount | None = None
    """The cost so far of a session that was parked by this; its last update."""
    record: RoundRecord | None = None
    """The round, where the session had one."""
    observed: Observed | None = None
    """What the target said in the round, where a source wants to know."""


@dataclass(frozen=True, slots=True)
class Strike:
    """A source sent a session a malformed draft."""

    handle: int
    source: int
    """The source's source index within that session."""
    why: str


@dataclass(frozen=True, slots=True)
class StepReport:
    """Results of one step for the event loop, with the beat of the next step."""

    step: int
    expected_us: int
    """Expected duration of the step that begins, in µs; 0 when idle."""
    updates: tuple[Update, ...] = ()
    strikes: tuple[Strike, ...] = ()
    least_survival: float = 0.0
    """Survival that a node needs, by its source's own estimate, to have a chance to be admitted now."""
