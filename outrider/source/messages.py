"""Attach's messages to events and back: checks what a peer may get wrong; knows no sockets."""

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
from outrider.wire.status import peer_text
from speculative.errors import InvalidRequest


def follow_from_wire(
    message: draft_source_pb2.Follow, stream: int, *, model: str, tokenizer_digest: str
) -> Follow:
    """The event of a Follow message, for a source of this tokenizer.

    Raises:
        NotFollowed: the tokenizers differ.
        InvalidRequest: a value is out of its range.
    """
    if tokenizer_digest and message.tokenizer_digest != tokenizer_digest:
        theirs = message.tokenizer_digest or "none at all"
        raise NotFollowed(
            f"target {message.model!r} has tokenizer {theirs}, source {model!r} has {tokenizer_digest}: "
            f"their ids mean different tokens"
        )
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
    )
    return Follow(stream, message.alias, key_from_wire(message.key), request)


def events_from_wire(
    message: draft_source_pb2.AttachRequest, stream: int, *, model: str, tokenizer_digest: str
) -> list[Event]:
    """Events of one message. Follows come last: they may reuse an alias that ends in this message."""
    events: list[Event] = [LeastSurvival(stream, min(FULL, message.least_survival) / FULL)]
    events.extend(
        Progress(
            stream,
            progress.alias,
            progress.position,
            tuple(progress.ids),
            progress.prefix_hash,
            progress.tops,
            progress.off_path,
        )
        for progress in message.progress
    )
    events.extend(SessionEnded(stream, alias) for alias in message.end)
    for follow in message.follow:
        try:
            events.append(follow_from_wire(follow, stream, model=model, tokenizer_digest=tokenizer_digest))
        except (NotFollowed, InvalidRequest) as error:
            events.append(MalformedFollow(stream, follow.alias, peer_text(str(error))))
    return events


def outgoing_to_wire(outgoing: Outgoing) -> draft_source_pb2.AttachResponse:
    """One Attach message with all drafts and refusals that go out on a stream."""
    sources = bytes(fragment.source - 1 for _, fragment in outgoing.drafts)
    return draft_source_pb2.AttachResponse(
        drafts=[fragment_to_wire(fragment, alias) for alias, fragment in outgoing.drafts],
        sources=sources if any(sources) else b"",
        refusals=[
            draft_source_pb2.Refusal(alias=alias, message=message) for alias, message in outgoing.refusals
        ],
    )
