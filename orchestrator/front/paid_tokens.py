"""Which tokens of a resumed request its key has paid for already, as far as the store's record shows."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from orchestrator.admitted_request import AdmittedRequest
from outrider.wire.codec import SessionKey

PAID_S = 0.1
"""The longest that a resumed request waits for the record that shows what was paid for, in seconds."""

RecordedIds = Callable[[SessionKey], Awaitable[Sequence[int]]]
"""Looks up the generated token ids on record of a choice; empty where there is no record."""


async def count_unpaid(request: AdmittedRequest, recorded_ids: RecordedIds) -> int:
    """Number of tokens in `have` that no record shows as generated, and so as paid for.

    `have` is the client's own claim, and each of its tokens is computed like a token of a prompt. Where the
    record does not answer within PAID_S, or differs from `have`, no token counts as paid for.
    """
    claimed = {
        request.keys[choice]: ids
        for choice, ids in enumerate(request.have or ())
        if ids and choice not in request.ended
    }
    try:
        async with asyncio.timeout(PAID_S):
            recorded = await asyncio.gather(*map(recorded_ids, claimed))
    except TimeoutError:
        recorded = [()] * len(claimed)
    return sum(len(ids) - _paid(ids, known) for ids, known in zip(claimed.values(), recorded, strict=True))


def _paid(ids: Sequence[int], recorded: Sequence[int]) -> int:
    """Number of ids that are on record too; 0 where the two differ."""
    both = min(len(ids), len(recorded))
    return both if tuple(ids[:both]) == tuple(recorded[:both]) else 0
