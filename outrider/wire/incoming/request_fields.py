"""Which fields of an Open a verifier knows: a field that it does not know, it would ignore in silence.

Protobuf drops unknown fields. That is harmless for a field that only says how to draft, and wrong for one
that decides tokens or what comes back with them. So verifiers list what they know, and a session that uses
something else goes elsewhere or is refused by name.
"""

from collections.abc import Collection, Iterator

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from outrider.v1 import verifier_pb2


def _inside(field: FieldDescriptor) -> Descriptor | None:
    """The message whose fields count, too; None: the field holds values, such as the entries of a map."""
    inner = field.message_type
    return None if inner is None or inner.GetOptions().map_entry else inner


def _paths(descriptor: Descriptor, above: str = "") -> Iterator[str]:
    for field in descriptor.fields:
        yield (path := above + field.name)
        if (inner := _inside(field)) is not None:
            yield from _paths(inner, f"{path}.")


REQUEST_FIELDS = tuple(_paths(verifier_pb2.OpenRequest.DESCRIPTOR))
"""Every field of OpenRequest that this software knows, those of messages inside it as `sampling.top_k`."""
_SINCE = (
    "sampling.contrast_strength",
    "sampling.contrast_plausibility",
    "grammar.choice",
    "grammar.lark",
    "grammar.preamble",
)
FIRST_FIELDS = frozenset(REQUEST_FIELDS) - frozenset(_SINCE)
"""What a verifier without a list is taken to know. A criterion counts as known: `criteria` says that."""
_DRAFTING = frozenset({"corpora", "learn", "policy", "prediction", "references"})
"""Fields that only say how to draft: where they are ignored, answers stay what they are."""


def unknown_field(message: verifier_pb2.OpenRequest, known: Collection[str]) -> str:
    """The first field that the message uses and that is not `known`; empty: there is none.

    Fields that only say how to draft are left out, and so are fields at their default.
    """
    return next(_unknown(message, known), "")


def _unknown(message: Message, known: Collection[str], above: str = "") -> Iterator[str]:
    for field, value in message.ListFields():
        path = above + field.name
        if path in _DRAFTING:
            continue
        if path not in known:
            yield path
        elif _inside(field) is not None:
            for inner in (value,) if isinstance(value, Message) else value:
                yield from _unknown(inner, known, f"{path}.")
