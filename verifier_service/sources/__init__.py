"""Where drafts come from: sources inside this worker by name, and links to those outside."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from outrider.wire.names import PREDICTION
from speculative.draft import Draft
from speculative.named import load

LOCAL_SOURCES = {
    "lookup": "verifier_service.sources.lookup:LookupSource",
    PREDICTION: "verifier_service.sources.prediction:PredictionSource",
}
"""Name to "module:class" of a LocalSource that is made from what its session's request brings, `Given`."""


@dataclass(frozen=True, slots=True)
class Given:
    """What a request brings for the sources of its session."""

    prompt_length: int
    prediction: tuple[int, ...] = ()
    """Ids that the answer may resemble."""


@dataclass(frozen=True, slots=True)
class SourceSet:
    """The sources of one session."""

    names: tuple[str, ...]
    """What credits mean: k is names[k - 1]. Only ever grows, whatever is in use."""
    local: frozenset[int]
    """Credit indices of sources in use inside this worker."""
    remote: frozenset[int]
    """Credit indices of sources in use outside."""


class LocalSource(Protocol):
    """Drafts for one session on the engine thread, so both methods have to take microseconds."""

    def push(self, tokens: Sequence[int]) -> None:
        """These ids follow those pushed before: the prompt first, then what is committed."""

    def draft(self, node_limit: int) -> Draft | None:
        """What may follow the last id: at most so many nodes, or None."""


@dataclass(slots=True)
class LocalInUse:
    """A source of one session, and how many of its ids it has been given."""

    credit: int
    source: LocalSource
    pushed: int = 0


def make_local(name: str, given: Given) -> LocalSource:
    """A new source of the table. Raises KeyError for a name that is not in it."""
    source: LocalSource = load(LOCAL_SOURCES, name)(given)
    return source
