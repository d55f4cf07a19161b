"""What a device reads of a request's stream, and the drafts that it sends; pure."""

from outrider.edge.device_session import Terms
from outrider.v1 import generation_pb2
from outrider.wire.codec import sampling_from_wire
from speculative.fragment import Fragment
from speculative.tree import ROOT

FULL = 255
"""The byte that stands for a survival of 1."""


def terms_from_wire(started: generation_pb2.GenerateStarted, have: tuple[int, ...], max_length: int) -> Terms:
    """The terms on which a device drafts.

    Args:
        started: the stream's first message, with the prompt's ids.
        have: ids of the part of the answer that the client has.
        max_length: the most ids that the device's model reads.

    Raises:
        InvalidRequest: the sampling parameters are out of their ranges.
    """
    terms = started.device
    return Terms(
        ids=(*started.prompt_ids, *have),
        prompt_length=len(started.prompt_ids),
        seed=started.seed,
        epoch=started.epoch,
        params=sampling_from_wire(terms.sampling, terms.vocabulary_size),
        vocabulary_size=terms.vocabulary_size,
        limit=min(terms.limit, max_length),
        credits=terms.credits,
        credits_per_token=terms.credits_per_token,
        end_ids=frozenset(terms.end_ids),
        node_limit=terms.node_limit,
    )


def drafts_to_wire(
    fragment: Fragment | None, *, epoch: int = 0, wait_ms: int | None = None
) -> generation_pb2.GenerateRequest:
    """A message with a window of drafts, or one that only sets how long rounds may wait.

    Args:
        epoch: the epoch of the window if the server has not had this epoch from the device yet; else 0.
        wait_ms: milliseconds that later rounds may wait; None: unchanged.
    """
    drafts = generation_pb2.DeviceDrafts(epoch=epoch, wait_ms=wait_ms)
    if fragment is not None:
        drafts.base, drafts.prefix_hash = fragment.base, fragment.prefix_hash
        drafts.ids.extend(fragment.tokens)
        if any(parent != node + ROOT for node, parent in enumerate(fragment.parents)):
            drafts.parents = bytes(parent + 1 for parent in fragment.parents)
        drafts.survival = bytes(max(1, round(share * FULL)) for share in fragment.survival)
    return generation_pb2.GenerateRequest(drafts=drafts)
