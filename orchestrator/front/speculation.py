"""How a request wants to be drafted for, checked. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.v1 import generation_pb2
from outrider.wire.names import checked_corpora
from speculative.errors import InvalidRequest

MAX_NODE_LIMIT = 256


@dataclass(frozen=True, slots=True)
class Speculation:
    """How a request wants to be drafted for."""

    enabled: bool
    sources: tuple[str, ...]
    """Empty: all there are."""
    node_limit: int | None
    """None: the verifier's own."""
    learn: bool = True
    """Whether sources may keep the output to draft from, for the same tenant."""
    corpora: tuple[str, ...] = ()
    """Empty: all that the tenant may draw on."""
    prediction: tuple[int, ...] = ()
    """Ids that the answer may resemble; empty: nobody knows."""


def checked_speculation(asked: generation_pb2.Speculation, prediction: Sequence[int]) -> Speculation:
    """`prediction` is that of the request, tokenized.

    Raises InvalidRequest for a value out of its range, and where it is said how to draft, but not to.
    """
    node_limit = asked.node_limit if asked.HasField("node_limit") else None
    if node_limit is not None and not 0 <= node_limit <= MAX_NODE_LIMIT:
        raise InvalidRequest(f"speculation.node_limit is {node_limit}; 0 to {MAX_NODE_LIMIT} are possible")
    enabled = asked.enabled if asked.HasField("enabled") else True
    if not enabled:
        _check_nothing_to_draft(asked)
    return Speculation(
        enabled and node_limit != 0,
        tuple(dict.fromkeys(asked.sources)),
        node_limit,
        learn=asked.learn if asked.HasField("learn") else True,
        corpora=checked_corpora(asked.corpora),
        prediction=tuple(prediction),
    )


def _check_nothing_to_draft(asked: generation_pb2.Speculation) -> None:
    """A node limit of 0 says the same again; a prediction is of the answer, not of how to draft it."""
    says = ""
    if asked.sources:
        says = f"sources names {asked.sources[0]!r}"
    elif asked.corpora:
        says = f"corpora names {asked.corpora[0]!r}"
    elif asked.node_limit:
        says = f"node_limit is {asked.node_limit}"
    if says:
        raise InvalidRequest(
            f"speculation.{says}, but speculation.enabled is false: leave one of the two out"
        )
