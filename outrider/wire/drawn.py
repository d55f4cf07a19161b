"""Windows of drawn drafts on the wire and back: what each node was drawn from, in bytes."""

from struct import Struct

from speculative.draft import MAX_DRAFT_NODES
from speculative.draft_law import QuantisedLaw
from speculative.drawn_window import DrawnWindow
from speculative.errors import MalformedDraft
from speculative.fragment import Fragment

_ENTRY = Struct("<IH")
"""An id, and its weight less one."""


def laws_to_wire(laws: tuple[QuantisedLaw, ...]) -> bytes:
    """The bytes of `Draft.q`: for each law a byte of its size, then six bytes an id."""
    parts = []
    for law in laws:
        parts.append(bytes([len(law.ids)]))
        parts += [
            _ENTRY.pack(id_, weight - 1)
            for id_, weight in zip(law.ids.tolist(), law.weights.tolist(), strict=True)
        ]
    return b"".join(parts)


def laws_from_wire(data: bytes) -> tuple[QuantisedLaw, ...]:
    """The laws of `Draft.q`. Raises MalformedDraft for bytes that are no distributions."""
    laws, start = list[QuantisedLaw](), 0
    while start < len(data):
        if len(laws) == MAX_DRAFT_NODES:
            raise MalformedDraft(f"q has more laws than the {MAX_DRAFT_NODES} nodes of the largest draft")
        count, start = data[start], start + 1
        end = start + count * _ENTRY.size
        if end > len(data):
            raise MalformedDraft(f"q ends amid a law: {end} bytes are announced, {len(data)} are there")
        entries = list(_ENTRY.iter_unpack(data[start:end]))
        laws.append(QuantisedLaw.of([id_ for id_, _ in entries], [less + 1 for _, less in entries]))
        start = end
    return tuple(laws)


def window_from_wire(fragment: Fragment, q: bytes, *, whole: bool) -> DrawnWindow:
    """The window of a draft that is whole and has q. Raises MalformedDraft for any other draft."""
    if not (whole and q):
        raise MalformedDraft("a draft is whole without q, or has q and is not whole; send both or neither")
    return DrawnWindow(
        fragment.source,
        fragment.epoch,
        fragment.base,
        fragment.prefix_hash,
        fragment.tokens,
        fragment.parents,
        fragment.survival,
        laws_from_wire(q),
    )
