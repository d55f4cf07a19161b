"""Prefixes of token sequences: at which lengths the store remembers them, by which hashes, for whom.

With blocks of 16 tokens a long context would have thousands of lengths. So prefixes are remembered only at
lengths whose number of blocks has at most four significant binary digits: 8 lengths for each doubling, which
finds at least seven eighths of any overlap. Writer and reader use the same lengths. Pure, but for the use of
a thread.
"""

import asyncio
from collections.abc import Sequence

from orchestrator.store import Handle
from outrider.wire.codec import SessionKey
from speculative.hashing import prefix_hash, prefix_hashes

BLOCK = 16
PER_DOUBLING = 8
MANY_TOKENS = 8192
"""Longer sequences are hashed in a thread: a hundred thousand tokens take several milliseconds."""


def lengths(most: int) -> list[int]:
    """Lengths at which prefixes of up to `most` tokens are remembered, the longest first."""
    found, blocks, step = [], 1, 1
    while blocks * BLOCK <= most:
        found.append(blocks * BLOCK)
        if blocks == 2 * PER_DOUBLING * step:
            step *= 2
        blocks += step
    return found[::-1]


def hashes(ids: Sequence[int]) -> list[int]:
    """Hashes of the prefixes of `ids` that are remembered, the longest first."""
    if len(ids) < BLOCK:
        return []
    every = prefix_hashes(ids)
    return [int(every[length]) for length in lengths(len(ids))]


async def hashes_off_loop(ids: Sequence[int]) -> list[int]:
    """Hashes of the prefixes of `ids`, like `hashes`; in a thread where the sequence is long."""
    return hashes(ids) if len(ids) < MANY_TOKENS else await asyncio.to_thread(hashes, ids)


def scope_of(key: SessionKey, model: str) -> str:
    """The scope of a session's prefixes: only sessions of the same tenant and model find them."""
    return f"{key.tenant}\0{model}"


def begins_with(ids: Sequence[int], handle: Handle) -> bool:
    """Whether `ids` begin with all the tokens of the handle."""
    return 0 < handle.length <= len(ids) and prefix_hash(ids[: handle.length]) == handle.prefix_hash
