"""A session's subscription to one source, and the Follow message that introduces the session there."""

from dataclasses import dataclass

from outrider.v1 import draft_source_pb2
from outrider.wire.codec import key_to_wire, sampling_to_wire
from outrider.wire.criteria import criterion_to_wire
from speculative.draft import MAX_DRAFT_NODES
from verifier_service.remote_sources.source_rests import SourceActivity
from verifier_service.sessions.table import SessionView

# A source may keep this many rounds' worth of nodes under way.
_ROUNDS_AHEAD = 2
ID_BYTES = 5
"""The most bytes of a token id in a message."""
BIAS_BYTES = 20
"""The most bytes of an entry of `logit_bias` in a message."""
STRING_BYTES = 8
"""The most bytes before a string in a message."""
FIXED_BYTES = 512
"""The most bytes of a Follow's numbers and of its traceparent."""


@dataclass(frozen=True, slots=True)
class Subscription:
    """One session and the names under which one source drafts for that session."""

    view: SessionView
    source_indices: tuple[int, ...]
    """The source's indices in the session, one for each of its names there."""
    names: tuple[str, ...]
    """The source's names in the session."""
    model: str
    tokenizer_digest: str
    vocabulary_size: int
    """Width of the target's logits."""
    activity: SourceActivity
    """What all sessions found out about the source, under these names."""

    @property
    def name(self) -> str:
        """The source's first name, for counts that belong to the source as a whole."""
        return self.names[0]

    @property
    def follow_bytes(self) -> int:
        """The most bytes of the Follow message, with the session's tokens of this moment."""
        request = self.view.request
        params = request.params
        texts = (
            *self.names,
            *request.corpora,
            self.model,
            self.tokenizer_digest,
            *request.key[:2],
            request.policy,
        )
        return (
            FIXED_BYTES
            + ID_BYTES * (len(self.view.ids) + len(params.stop_ids))
            + BIAS_BYTES * len(params.logit_bias)
            + sum(len(text.encode()) + STRING_BYTES for text in texts)
        )

    def message(self, alias: int, drafts: bool = True) -> draft_source_pb2.Follow:
        """The Follow message, with the session's tokens of this moment.

        Without `drafts` the session has ended, and the source can only learn from its tokens.
        """
        request = self.view.request
        criterion = request.criterion
        drawn = criterion if criterion is not None and criterion.needs_q else None
        # A window is judged in one round, so that a source draws no more than a round verifies.
        rounds = _ROUNDS_AHEAD if drawn is None else 1
        return draft_source_pb2.Follow(
            alias=alias,
            key=key_to_wire(request.key),
            epoch=request.epoch,
            model=self.model,
            tokenizer_digest=self.tokenizer_digest,
            ids=self.view.ids,
            prompt_length=request.prompt_length,
            limit=request.limit,
            sampling=sampling_to_wire(request.params),
            seed=request.seed,
            node_limit=min(rounds * request.node_limit, MAX_DRAFT_NODES) if drafts else 0,
            vocabulary_size=self.vocabulary_size,
            sources=self.names,
            learn=request.learn,
            corpora=request.corpora,
            traceparent=self.view.traceparent,
            policy=request.policy,
            criterion=None if drawn is None else criterion_to_wire(drawn),
        )
