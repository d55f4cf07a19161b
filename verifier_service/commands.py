"""What crosses between the event loop and the engine thread: commands in, one batch per step out.

A session is named by its handle, a number that no two incarnations share. Knows nothing of sockets or
tensors.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from speculative.commit import FinishReason
from speculative.fragment import Fragment
from speculative.logprobs import TokenLogprob
from speculative.stats import UsageCount
from verifier_service.observe.round_log import RoundRecord
from verifier_service.open_sessions.request import SourceSet

if TYPE_CHECKING:
    from verifier_service.sessions import Session


@dataclass(frozen=True, slots=True)
class Open:
    """Decode this session; the engine owns it from here on."""

    session: "Session"


@dataclass(frozen=True, slots=True)
class Cancel:
    """End a session when the step in flight ends."""

    handle: int
    message: str = ""


@dataclass(frozen=True, slots=True)
class Park:
    """Decode a session no further and give its memory up; who reads it again has it opened anew."""

    handle: int


@dataclass(frozen=True, slots=True)
class Sources:
    """From now on these sources draft for a session."""

    handle: int
    sources: SourceSet


@dataclass(slots=True)
class InFlight:
    """How many drafts of one link came since the engine last took some. The loop adds, the engine takes."""

    put: int = 0
    taken: int = 0

    @property
    def count(self) -> int:
        """Drafts in the inbox, or merged while the target computes; read by the loop."""
        return self.put - self.taken


@dataclass(frozen=True, slots=True)
class Offers:
    """What one message of a source brought: pairs of session handle and fragment."""

    drafts: tuple[tuple[int, Fragment], ...]
    arrived_s: float
    """When it came in, on the clock of time.perf_counter."""
    in_flight: InFlight


@dataclass(frozen=True, slots=True)
class Stop:
    """End the engine thread."""


Command = Open | Cancel | Park | Sources | Offers | Stop


@dataclass(frozen=True, slots=True)
class Finish:
    """How a session ended."""

    reason: FinishReason
    usage: UsageCount
    message: str = ""
    code: int = 0
    """As in the contract's Committed.code."""


class Update(NamedTuple):
    """What one step did to one session."""

    handle: int
    position: int
    """Absolute position of the first id."""
    ids: tuple[int, ...]
    credits: bytes
    """One byte per id: 0 the target itself, k the session's source k - 1."""
    prefix_hash: int
    """Over all ids up to and including these."""
    finish: Finish | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    """One per id where the request asked for them."""
    resting: frozenset[int] = frozenset()
    """Sources, by credit index, that are not to be told of this."""
    rounds: int = 0
    """Rounds of the session so far."""
    admitted: int = 0
    """Drafted nodes that they computed."""
    parked: UsageCount | None = None
    """What it has cost so far, where it was parked: nothing more comes of it."""
    record: RoundRecord | None = None
    """What its round was, where it had one."""


@dataclass(frozen=True, slots=True)
class Strike:
    """A source sent a session something malformed."""

    handle: int
    source: int
    """Credit index within that session."""
    why: str


@dataclass(frozen=True, slots=True)
class Batch:
    """All that one step has to tell, and the beat of the next."""

    step: int
    expected_us: int
    """Of the step that begins; 0 when idle."""
    updates: tuple[Update, ...] = ()
    strikes: tuple[Strike, ...] = ()
    least_survival: float = 0.0
    """Of a source's nodes, by its own estimate, to have a chance to be admitted now."""
