"""What the target said, as the bytes of `Progress.tops` and `Progress.off_path` (see draft_source.proto)."""

import math
import struct
from collections.abc import Sequence

from speculative.errors import InvalidRequest
from speculative.observed import Observed, OffPathRow, TopIds

_LOWEST = -65504.0
"""The lowest finite number of 16 bits; anything below is sent as minus infinity."""


def tops_to_wire(tops: Sequence[TopIds], count: int) -> bytes:
    """The `count` likeliest ids of each place, each with its log-probability."""
    packed = struct.Struct("<" + "Ie" * count)
    parts = []
    for top in tops:
        logprobs = [logprob if logprob >= _LOWEST else -math.inf for logprob in top.logprobs[:count]]
        pairs = zip(top.ids[:count], logprobs, strict=True)
        parts.append(packed.pack(*[value for pair in pairs for value in pair]))
    return b"".join(parts)


def off_path_to_wire(rows: Sequence[OffPathRow], count: int) -> bytes:
    """The rows, each with its `count` likeliest ids."""
    packed = _off_path(count)
    return b"".join([packed.pack(row.prefix_hash, row.last, row.token, *row.top_ids[:count]) for row in rows])


def observed_from_wire(tops: bytes, off_path: bytes, count: int) -> Observed:
    """What a Progress says to a source that wants `count` tops.

    Raises InvalidRequest where the bytes are no whole number of places or rows.
    """
    pairs, row = struct.Struct("<" + "Ie" * count), _off_path(count)
    if count < 1 or len(tops) % pairs.size or len(off_path) % row.size:
        raise InvalidRequest(
            f"progress has {len(tops)} bytes of tops and {len(off_path)} of off_path; with {count} tops they "
            f"come in {pairs.size} bytes per token and {row.size} per node"
        )
    return Observed(
        count,
        tuple([TopIds(fields[::2], fields[1::2]) for fields in pairs.iter_unpack(tops)]),
        tuple(
            [
                OffPathRow(prefix_hash, last, token, tuple(top))
                for prefix_hash, last, token, *top in row.iter_unpack(off_path)
            ]
        ),
    )


def _off_path(count: int) -> struct.Struct:
    return struct.Struct(f"<QII{count}I")
