"""How much the service holds, of all tenants together."""

from dataclasses import dataclass

from retrieval_service.engine import Engine


@dataclass(frozen=True, slots=True)
class Held:
    """See `retrieval_service.metrics.HELD`."""

    corpora: int = 0
    corpus_tokens: int = 0
    mapped_bytes: int = 0
    past_tokens: int = 0
    references: int = 0
    sessions: int = 0


def held(engine: Engine) -> Held:
    """As it is now; from any thread."""
    headers = [index.header for _, index in engine.holdings]
    past, references = engine.holdings.past, engine.holdings.references
    return Held(
        corpora=len(headers),
        corpus_tokens=sum(header.tokens for header in headers),
        mapped_bytes=sum(header.size for header in headers),
        past_tokens=0 if past is None else past.stats().tokens,
        references=0 if references is None else references.count,
        sessions=len(engine.roster),
    )
