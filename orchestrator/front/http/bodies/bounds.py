"""How large a body can be: derived from the largest request that the served models can take. Pure.

A body may say the same in more bytes: escapes, spaces, line ends. The bounds leave room for the longest
escapes and for a number on a line of its own, but not for spaces without end.
"""

from dataclasses import dataclass
from enum import StrEnum

from speculative.params import MAX_BIAS_ENTRIES, MAX_STOP_IDS
from speculative.request_bounds import (
    MAX_CHOICE_BYTES,
    MAX_CHOICE_TEXTS,
    MAX_LARK_BYTES,
    MAX_REGEX_BYTES,
    MAX_SCHEMA_BYTES,
)
from speculative.stop import MAX_STOP_BYTES, MAX_STOPS

LOOP_BYTES = 65_536
"""The most bytes of a body that are read on the event loop: Python reads no such body for more than some
5 ms."""
ID_BYTES = 24
"""The most bytes of a token id: ten digits, a comma, a line end and spaces before it."""
ESCAPED = 6
"""Bytes of the longest escape for a byte of text, `\\u0041`."""
MESSAGE_BYTES = 256
"""The most bytes of a message beside its text: names, quotes, spaces."""
ITEM_BYTES = 768
"""The most bytes of an item or a block of another API beside its text: it has ids, states and types."""
BIAS_BYTES = 64
REST_BYTES = 65_536
"""The most bytes of all fields without a list, a table or a text of the client's."""
GRAMMAR_BYTES = max(MAX_SCHEMA_BYTES, MAX_REGEX_BYTES, MAX_LARK_BYTES, MAX_CHOICE_BYTES)
FIELD_BYTES = (
    REST_BYTES
    + MAX_BIAS_ENTRIES * BIAS_BYTES
    + MAX_STOP_IDS * ID_BYTES
    + (MAX_STOPS * MAX_STOP_BYTES + GRAMMAR_BYTES) * ESCAPED
    + MAX_CHOICE_TEXTS * ID_BYTES
)
"""The most bytes of the fields that every completion may have."""


class BodyKind(StrEnum):
    """What a body asks for, by the route that it came to."""

    COMPLETION = "completion"
    CHAT = "chat"
    TOKENIZE = "tokenize"
    DETOKENIZE = "detokenize"
    RESPONSES = "responses"
    MESSAGES = "messages"
    COUNT = "count"

    @property
    def translated(self) -> bool:
        """Whether a chat completion stands for the body."""
        return self in (BodyKind.RESPONSES, BodyKind.MESSAGES, BodyKind.COUNT)


@dataclass(frozen=True, slots=True)
class BodyBounds:
    """What a body may hold: the largest value of any model that is served."""

    context: int
    """Tokens of a prompt and its answer."""
    text_bytes: int
    """Bytes of a text that could fit the context; 0 where no served model has a tokenizer."""
    prompts: int
    """Prompts in a body."""
    most_bytes: int
    """Bytes of any body, as the settings say."""

    def largest(self, kind: BodyKind) -> int:
        """The most bytes of a body of this kind."""
        ids, text = self.context * ID_BYTES, self.text_bytes * ESCAPED
        match kind:
            case BodyKind.COMPLETION:
                needed = self.prompts * max(ids, text) + 2 * text + FIELD_BYTES
            case BodyKind.CHAT:
                needed = text + self.context * MESSAGE_BYTES + text + FIELD_BYTES
            case BodyKind.RESPONSES | BodyKind.MESSAGES | BodyKind.COUNT:
                needed = text + self.context * ITEM_BYTES + text + FIELD_BYTES
            case BodyKind.TOKENIZE:
                needed = text + self.context * MESSAGE_BYTES + REST_BYTES
            case BodyKind.DETOKENIZE:
                needed = ids + REST_BYTES
        return min(needed, self.most_bytes)
