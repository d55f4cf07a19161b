"""The grammar of a request's generated text, and the interface by which sampling asks for allowed ids.

Each session has a `Matcher`. Its state is a function of the generated ids, so every node of a draft tree has
a state of its own, and a session that is rebuilt from its ids has the same state again. Knows no grammar
library.
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
from speculative.request_bounds import MAX_REGEX_BYTES, MAX_SCHEMA_BYTES


class GrammarKind(StrEnum):
    """Notation in which a grammar is given."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    JSON_OBJECT = "json_object"


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that the generated text has to match from its first byte on.

    Raises:
        InvalidRequest: too large, or a schema that is no JSON object. The compiler finds all other errors.
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
        """Raises InvalidRequest for sampling parameters that contradict a grammar."""
        if params.ignore_eos:
            raise InvalidRequest(
                f"ignore_eos cannot be together with {self.kind}: a complete text would have to go on; "
                f"leave one of them out"
            )


class Matcher(Protocol):
    """The state of one session's grammar after the session's committed ids."""

    def allowed(self, path: Sequence[int]) -> NDArray[np.bool_]:
        """Mask of the ids that may follow the committed ids and `path`: bool[V], read-only for the caller.

        End-of-sequence ids are allowed where the text is complete, and are alone where nothing may follow.
        The call changes no state that a caller can see. Each id of `path` was allowed at its place.

        Raises:
            EmptySupport: no id may follow, or finding out would cost too much.
        """

    def commit(self, tokens: Sequence[int]) -> None:
        """Advances over committed ids, each of which was allowed at its place."""


def _check_object(text: str) -> None:
    try:
        found = json.loads(text)
    except RecursionError:
        raise InvalidRequest("json_schema is nested too deeply") from None
    except ValueError as error:
        raise InvalidRequest(f"json_schema is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise InvalidRequest(f"json_schema is {text[:40]!r}; it must be a JSON object")
