"""What a request says its answer may resemble, as ids that a verifier drafts from."""

import asyncio
from collections.abc import Sequence

from orchestrator.front.admission import LEAST_TOKEN_BYTES, Target
from speculative.errors import InvalidRequest


async def prediction_ids(text: str, target: Target) -> Sequence[int]:
    """The text, tokenized in a thread; none where it is empty. Raises InvalidRequest where it is too long."""
    if not text:
        return ()
    if target.tokens is None:
        raise InvalidRequest(f"prediction cannot be used: model {target.name!r} has no tokenizer")
    size = len(text.encode())
    most = target.max_length * max(target.tokens.longest_token_bytes, LEAST_TOKEN_BYTES)
    if size > most:
        raise InvalidRequest(
            f"prediction has {size} bytes, more than the context of {target.max_length} ids can hold "
            f"(at most {most})"
        )
    ids = await asyncio.to_thread(target.tokens.encode, text, add_special=False)
    if len(ids) >= target.max_length:
        raise InvalidRequest(
            f"prediction has {len(ids)} ids; no answer in a context of {target.max_length} has so many"
        )
    return ids
