"""A target model as its verifier describes it.

Requests are checked against the description, and sessions are placed by it.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from outrider.tokens import ChatTemplate, TokenTable
from outrider.v1 import common_pb2, verifier_pb2
from outrider.wire.incoming.request_fields import FIRST_FIELDS, REQUEST_FIELDS


class ModelIdentity(NamedTuple):
    """Which model a verifier serves, whatever dtype and device it computes with."""

    tokenizer_digest: str
    vocabulary_size: int
    weights_digest: str
    """Digest of the weights; empty: unknown, which agrees with any weights."""

    def agrees(self, other: "ModelIdentity") -> bool:
        """Whether a session can move from one of the two models to the other."""
        weights = self.weights_digest, other.weights_digest
        return self[:2] == other[:2] and (weights[0] == weights[1] or not all(weights))


@dataclass(frozen=True, slots=True)
class TargetModel:
    """A model that a verifier serves."""

    name: str
    max_length: int
    """The most tokens of a session, prompt included."""
    vocabulary_size: int
    tokenizer_digest: str
    tokens: TokenTable | None
    local_sources: tuple[str, ...]
    """Names of the sources inside the verifier."""
    chat: ChatTemplate | None = None
    """The template that makes a prompt of a conversation; None: the model takes no conversations."""
    weights_digest: str = ""
    """Digest of the weights; empty: unknown."""
    eos_ids: frozenset[int] = frozenset()
    """The model's end-of-sequence ids."""
    sampling_defaults: common_pb2.Sampling = field(default_factory=common_pb2.Sampling, hash=False)
    """The parameters that the checkpoint's generation config sets."""
    criteria: tuple[str, ...] = ()
    """Names of the criteria that a request may name."""
    request_fields: frozenset[str] = frozenset(REQUEST_FIELDS)
    """The fields of OpenRequest that the verifier knows."""

    @property
    def identity(self) -> ModelIdentity:
        """Tokenizer, vocabulary size and weights, by which models are compared."""
        return ModelIdentity(self.tokenizer_digest, self.vocabulary_size, self.weights_digest)


def target_from_wire(message: verifier_pb2.VerifierDescription, tokens: TokenTable | None) -> TargetModel:
    """The model that a verifier describes, with the tokenizer that the verifier sent."""
    chat = None
    if message.HasField("chat_template"):
        given = message.chat_template
        chat = ChatTemplate(given.source, dict(given.tokens), given.response)
    return TargetModel(
        name=message.model,
        max_length=message.max_length,
        vocabulary_size=message.vocabulary_size,
        tokenizer_digest=message.tokenizer_digest,
        tokens=tokens,
        local_sources=tuple(message.local_sources),
        chat=chat,
        weights_digest=message.weights_digest,
        eos_ids=frozenset(message.eos_ids),
        sampling_defaults=message.sampling_defaults,
        criteria=tuple(message.criteria),
        request_fields=frozenset(message.request_fields) or FIRST_FIELDS,
    )


def read_tokenizer(data: bytes) -> TokenTable:
    """The tokenizer in `data`. Slow: call this in a thread.

    Reading a large tokenizer takes long, and so does finding its longest token.
    """
    table = TokenTable.from_json(data.decode())
    _ = table.longest_token_bytes
    return table
