"""Attach's messages to events and back: checks what a peer may get wrong; knows no sockets."""

from collections.abc import Callable, Iterator
from functools import partial

from outrider.source.events import (
    DecodingRequest,
    Event,
    Follow,
    LeastSurvival,
    MalformedFollow,
    NotFollowed,
    Outgoing,
    Progress,
    SessionEnded,
)
from outrider.v1 import draft_source_pb2
from outrider.wire.codec import FULL, fragment_to_wire, key_from_wire, sampling_from_wire
from outrider.wire.incoming.shape import Bounds
from outrider.wire.status import peer_text
from speculative.errors import InvalidRequest
from speculative.policies.names import checked_policy

LONGEST = 1 << 20
"""The longest session that a source follows where its profile says no other length, in tokens."""
ATTACH_BOUNDS = Bounds(most_bytes=2**31, most_fields=2**17, most_numbers=2**24)
"""Bounds of an AttachRequest, which may introduce many sessions of a verifier; the process's largest message
bounds its bytes."""
MOST_AT_ONCE = 4096
"""The most follows, the most progresses and the most ends of one message."""


def follow_from_wire(
    message: draft_source_pb2.Follow,
    stream: int,
    *,
    model: str,
    tokenizer_digest: str,
    max_length: int = LONGEST,
) -> Follow:
    """The event of a Follow message, for a source of this tokenizer.

    Raises:
        NotFollowed: the tokenizers differ, or the session is longer than `max_length` tokens.
        InvalidRequest: a value is out of its range.
    """
    if tokenizer_digest and message.tokenizer_digest != tokenizer_digest:
        theirs = message.tokenizer_digest or "none at all"
        raise NotFollowed(
            f"target {message.model!r} has tokenizer {theirs}, source {model!r} has {tokenizer_digest}: "
            f"their ids mean different tokens"
        )
    if len(message.ids) > max_length:
        raise NotFollowed(f"the session has {len(message.ids)} ids; source {model!r} can follow {max_length}")
    if not 1 <= message.prompt_length <= len(message.ids):
        raise InvalidRequest(f"prompt_length is {message.prompt_length} of {len(message.ids)} ids")
    if message.vocabulary_size < 1:
        raise InvalidRequest("vocabulary_size is 0; it must be the width of the target's logits")
    request = DecodingRequest(
        epoch=message.epoch,
        ids=tuple(message.ids),
        prompt_length=message.prompt_length,
        limit=message.limit,
        params=sampling_from_wire(message.sampling, message.vocabulary_size),
        seed=message.seed,
        node_limit=message.node_limit,
        vocabulary_size=message.vocabulary_size,
        sources=tuple(message.sources),
        learn=message.learn,
        corpora=tuple(message.corpora),
        policy=checked_policy(message.policy),
        criterion=message.criterion.WhichOneof("kind") or "",
    )
    return Follow(stream, message.alias, key_from_wire(message.key), request)


def events_from_wire(
    message: draft_source_pb2.AttachRequest,
    stream: int,
    *,
    model: str,
    tokenizer_digest: str,
    max_length: int = LONGEST,
) -> Iterator[Event]:
    """Events of one message, made one by one: a caller may pause between two of them.

    Follows come last: they may reuse an alias that ends in this message. Raises InvalidRequest where the
    message speaks of more sessions than any verifier has.
    """
    for name, count in (
        ("follow", len(message.follow)),
        ("progress", len(message.progress)),
        ("end", len(message.end)),
    ):
        if count > MOST_AT_ONCE:
            raise InvalidRequest(f"{name} has {count} entries; one message may have {MOST_AT_ONCE}")
    return _events(message, stream, partial(_followed, stream, model, tokenizer_digest, max_length))


def _events(
    message: draft_source_pb2.AttachRequest, stream: int, followed: Callable[[draft_source_pb2.Follow], Event]
) -> Iterator[Event]:
    yield LeastSurvival(stream, min(FULL, message.least_survival) / FULL)
    for progress in message.progress:
        yield Progress(
            stream,
            progress.alias,
            progress.position,
            tuple(progress.ids),
            progress.prefix_hash,
            progress.tops,
            progress.off_path,
        )
    for alias in message.end:
        yield SessionEnded(stream, alias)
    yield from map(followed, message.follow)


def _followed(
    stream: int, model: str, tokenizer_digest: str, max_length: int, message: draft_source_pb2.Follow
) -> Event:
    try:
        return follow_from_wire(
            message, stream, model=model, tokenizer_digest=tokenizer_digest, max_length=max_length
        )
    except (NotFollowed, InvalidRequest) as error:
        return MalformedFollow(stream, message.alias, peer_text(str(error)))


def outgoing_to_wire(outgoing: Outgoing) -> draft_source_pb2.AttachResponse:
    """One Attach message with all drafts, refusals and waits that go out on a stream."""
    sources = bytes(fragment.source - 1 for _, fragment in outgoing.drafts)
    return draft_source_pb2.AttachResponse(
        drafts=[fragment_to_wire(fragment, alias) for alias, fragment in outgoing.drafts],
        sources=sources if any(sources) else b"",
        refusals=[
            draft_source_pb2.Refusal(alias=alias, message=message) for alias, message in outgoing.refusals
        ],
        waits=[draft_source_pb2.Wait(alias=alias, ms=ms) for alias, ms in outgoing.waits.items()],
        weights_version=outgoing.weights_version,
    )
