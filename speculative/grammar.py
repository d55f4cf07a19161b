"""What a request's text has to be, and what sampling asks of whoever knows which ids lead there.

A `Matcher` is one session's: its state is a function of the generated ids, so every node of a draft tree has
its own, and a session that is rebuilt from its ids has the state it had. Knows no grammar library.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from speculative.errors import InvalidRequest
from speculative.params import SamplingParams

MAX_SCHEMA_BYTES = 65_536
MAX_REGEX_BYTES = 8_192


class GrammarKind(StrEnum):
    """How a grammar is given."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    JSON_OBJECT = "json_object"


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the generated text has to be, from its first byte on.

    Raises:
        InvalidRequest: too large, or a schema that is no JSON object. What it means is the compiler's to see.
    """

    kind: GrammarKind
    text: str = ""
    """The schema as JSON, or the regular expression; empty for any JSON object."""

    def __post_init__(self) -> None:
        if self.kind is GrammarKind.JSON_OBJECT:
            if self.text:
                raise InvalidRequest(f"json_object stands alone, without {self.text[:80]!r}")
            return
        size = len(self.text.encode("utf-8", "replace"))
        most = MAX_REGEX_BYTES if self.kind is GrammarKind.REGEX else MAX_SCHEMA_BYTES
        if not 1 <= size <= most:
            raise InvalidRequest(f"{self.kind} has {size} bytes; give 1 to {most}")
        if self.kind is GrammarKind.JSON_SCHEMA:
            _check_object(self.text)

    def check_with(self, params: SamplingParams) -> None:
        """Raises InvalidRequest where the request asks for what cannot be together with a grammar."""
        if params.ignore_eos:
            raise InvalidRequest(
                f"ignore_eos cannot be together with {self.kind}: a complete text would have to go on; "
                f"leave one of them out"
            )


class Matcher(Protocol):
    """One session's place in its grammar, after the ids that it has committed."""

    def allowed(self, path: Sequence[int]) -> NDArray[np.bool_]:
        """Which ids may come after the committed ones and `path`: bool[V], not to be changed.

        End-of-sequence ids are among them where the text is complete, and alone where nothing may follow.
        Changes nothing that a caller can see. Each id of `path` is one that was allowed at its place.

        Raises:
            EmptySupport: no id leads on, or finding out would cost too much.
        """

    def commit(self, tokens: Sequence[int]) -> None:
        """Moves past committed ids, each of which was allowed at its place."""


def _check_object(text: str) -> None:
    try:
        found = json.loads(text)
    except RecursionError:
        raise InvalidRequest("json_schema is nested too deeply") from None
    except ValueError as error:
        raise InvalidRequest(f"json_schema is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise InvalidRequest(f"json_schema is {text[:40]!r}; it must be a JSON object")
