"""What verifiers send to a source and what it sends back, as plain values; knows nothing of the wire."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.wire.codec import SessionKey
from speculative.errors import OutriderError
from speculative.fragment import Fragment
from speculative.params import SamplingParams


class NotFollowed(OutriderError):
    """A source cannot follow a session, or no longer; the message says why, with the numbers."""


@dataclass(frozen=True, slots=True)
class DecodingRequest:
    """How a followed session is decoded; see `Follow` in draft_source.proto."""

    epoch: int
    ids: tuple[int, ...]
    prompt_length: int
    limit: int
    params: SamplingParams
    seed: int
    node_limit: int
    vocabulary_size: int
    sources: tuple[str, ...] = ()
    """Names that the session listens to; `Fragment.source` is an index into them, from 1."""
    learn: bool = False
    """Whether the output may be kept to draft from."""
    corpora: tuple[str, ...] = ()
    """Names of the corpora to draft from; empty: all that the session's tenant may use."""
    policy: str = ""
    """The draft policy that the request names, NAME or NAME:NUMBER; empty: the source's own."""
    criterion: str = ""
    """The request's criterion, by name, where it accepts drafts that were drawn, in whole windows; empty: any
    other, or none."""


@dataclass(frozen=True, slots=True)
class Follow:
    """A verifier asks the source to follow a session."""

    stream: int
    alias: int
    key: SessionKey
    request: DecodingRequest


@dataclass(frozen=True, slots=True)
class Progress:
    """A verifier reports ids that the target has committed."""

    stream: int
    alias: int
    position: int
    ids: Sequence[int]
    prefix_hash: int
    tops: bytes = b""
    """What the target said at the places of these ids, for a source that wants it; see draft_source.proto."""
    off_path: bytes = b""
    """What the target said after other tokens, for such a source."""


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """A verifier reports that a session is over."""

    stream: int
    alias: int


@dataclass(frozen=True, slots=True)
class LeastSurvival:
    """A verifier reports the survival below which nodes are hardly admitted now."""

    stream: int
    survival: float


@dataclass(frozen=True, slots=True)
class StreamClosed:
    """An Attach stream broke, or was closed."""

    stream: int


@dataclass(frozen=True, slots=True)
class MalformedFollow:
    """An invalid follow, or one of another tokenizer, which the worker refuses."""

    stream: int
    alias: int
    why: str


Event = Follow | Progress | SessionEnded | LeastSurvival | StreamClosed | MalformedFollow


@dataclass(slots=True)
class Outgoing:
    """Fragments, refusals and waits to send on one stream, each with its alias."""

    drafts: list[tuple[int, Fragment]] = field(default_factory=list)
    refusals: list[tuple[int, str]] = field(default_factory=list)
    waits: dict[int, int] = field(default_factory=dict)
    """How many ms rounds may wait for this source's drafts; 0: they stop waiting. See draft_source.proto."""
    weights_version: int = 0
    """Version of the learnt weights that draft now; 0: those that the source was given."""
