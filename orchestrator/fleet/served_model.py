"""What a verifier says of its target, as requests are checked against it."""

from orchestrator.fleet.compatibility import Identity
from orchestrator.front.admission import Target
from outrider.tokens import ChatTemplate, TokenTable
from outrider.v1 import verifier_pb2


def target_of(said: verifier_pb2.VerifierDescription, tokens: TokenTable | None) -> Target:
    """The description, with the tokenizer that came with it."""
    chat = None
    if said.HasField("chat_template"):
        chat = ChatTemplate(said.chat_template.source, dict(said.chat_template.tokens))
    return Target(
        name=said.model,
        max_length=said.max_length,
        vocabulary_size=said.vocabulary_size,
        tokenizer_digest=said.tokenizer_digest,
        tokens=tokens,
        local_sources=tuple(said.local_sources),
        chat=chat,
        weights_digest=said.weights_digest,
    )


def identity_of(target: Target) -> Identity:
    """Which model it is."""
    return Identity(target.tokenizer_digest, target.vocabulary_size, target.weights_digest)


def read_tokenizer(data: bytes) -> TokenTable:
    """In a thread: a large one takes a while to read, and its longest token longer to find."""
    table = TokenTable.from_json(data.decode())
    _ = table.longest_token_bytes
    return table
