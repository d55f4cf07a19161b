"""Writes large JSON in pieces, so that other requests have their turn in between."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

PIECE = 256
"""Items of a list that are written at once."""


def json_bytes(value: Any) -> bytes:
    r"""A value as compact JSON in UTF-8, in one go.

    Half of a surrogate pair is written as an escape, such as \ud800. A client may send one in a schema,
    and an answer that repeats the schema has to hold it.
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")  # in JSON, this is how a half is escaped


async def json_in_pieces(value: Any) -> bytes:
    """A value as compact JSON in UTF-8; long lists, also within objects, are written a piece at a time."""
    if isinstance(value, Mapping):
        members = [json_bytes(name) + b":" + await json_in_pieces(held) for name, held in value.items()]
        return b"{" + b",".join(members) + b"}"
    if not isinstance(value, list | tuple) or len(value) <= PIECE:
        return json_bytes(value)
    pieces = []
    for start in range(0, len(value), PIECE):
        pieces.append(json_bytes(value[start : start + PIECE])[1:-1])
        await asyncio.sleep(0)
    return b"[" + b",".join(pieces) + b"]"
