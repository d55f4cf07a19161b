"""What verifiers tell a source, and what it tells them, as plain values; knows nothing of the wire."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.wire.codec import SessionKey
from speculative.errors import OutriderError
from speculative.fragment import Fragment
from speculative.params import SamplingParams


class NotFollowed(OutriderError):
    """A session that cannot be followed, or no longer; the message says why, with the numbers."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a follow says about decoding; see `Follow` in draft_source.proto."""

    epoch: int
    ids: tuple[int, ...]
    prompt_length: int
    limit: int
    params: SamplingParams
    seed: int
    node_limit: int
    vocabulary_size: int
    sources: tuple[str, ...] = ()
    """Names that the session listens to; the k-th, from 1, is what `Fragment.source` k means."""
    learn: bool = False
    """Whether the output may be kept to draft from."""
    corpora: tuple[str, ...] = ()
    """Corpora that are asked for by name; empty: all that its tenant may draw on."""


@dataclass(frozen=True, slots=True)
class Follow:
    """A request to follow a session, as it came over a stream."""

    stream: int
    alias: int
    key: SessionKey
    request: Request


@dataclass(frozen=True, slots=True)
class Progress:
    """The target has committed ids of a session."""

    stream: int
    alias: int
    position: int
    ids: Sequence[int]
    prefix_hash: int


@dataclass(frozen=True, slots=True)
class End:
    """A session ended."""

    stream: int
    alias: int


@dataclass(frozen=True, slots=True)
class Least:
    """Nodes of less survival than this have hardly a chance to be admitted now."""

    stream: int
    survival: float


@dataclass(frozen=True, slots=True)
class Broken:
    """A stream broke, or was closed."""

    stream: int


@dataclass(frozen=True, slots=True)
class Wrong:
    """A follow that no source could make sense of; refused like one that this source cannot follow."""

    stream: int
    alias: int
    why: str


Event = Follow | Progress | End | Least | Broken | Wrong


@dataclass(slots=True)
class Outgoing:
    """What goes out on one stream: fragments and refusals, each under its alias."""

    drafts: list[tuple[int, Fragment]] = field(default_factory=list)
    refusals: list[tuple[int, str]] = field(default_factory=list)
