"""The grammar of a request's generated text, and the interface by which sampling asks for allowed ids.

Each session has a `Matcher`. Its state is a function of the generated ids, so every node of a draft tree has
a state of its own, and a session that is rebuilt from its ids has the same state again. Knows no grammar
library.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from speculative.errors import InvalidRequest
from speculative.params import SamplingParams
from speculative.request_bounds import (
    MAX_CHOICE_BYTES,
    MAX_CHOICE_TEXTS,
    MAX_LARK_BYTES,
    MAX_PREAMBLE_BYTES,
    MAX_REGEX_BYTES,
    MAX_SCHEMA_BYTES,
)


class GrammarKind(StrEnum):
    """Notation in which a grammar is given."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    JSON_OBJECT = "json_object"
    CHOICE = "choice"
    LARK = "lark"


_LITERALS = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|#[^\n]*|/(?:\\.|[^/\\\n])+/')
_MOST_BYTES = {
    GrammarKind.JSON_SCHEMA: MAX_SCHEMA_BYTES,
    GrammarKind.REGEX: MAX_REGEX_BYTES,
    GrammarKind.CHOICE: MAX_CHOICE_BYTES,
    GrammarKind.LARK: MAX_LARK_BYTES,
}


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that the generated text has to match from its first byte on, or from the end of a preamble.

    Raises:
        InvalidRequest: too large, or a schema that is no JSON object. The compiler finds all other errors.
    """

    kind: GrammarKind
    text: str = ""
    """The schema as JSON, the regular expression, the texts of a choice as a JSON array (`one_of`), or the
    grammar in Lark's language; empty for any JSON object."""
    preamble: str = ""
    """The grammar, in Lark's language, of what comes before the text; empty: nothing does."""

    def __post_init__(self) -> None:
        if (size := len(self.preamble.encode("utf-8", "replace"))) > MAX_PREAMBLE_BYTES:
            raise InvalidRequest(f"preamble has {size} bytes; give at most {MAX_PREAMBLE_BYTES}")
        if self.kind is GrammarKind.JSON_OBJECT:
            if self.text:
                raise InvalidRequest(f"json_object stands alone, without {self.text[:80]!r}")
            return
        size = len(self.text.encode("utf-8", "replace"))
        most = _MOST_BYTES[self.kind]
        if not 1 <= size <= most:
            raise InvalidRequest(f"{self.kind} has {size} bytes; give 1 to {most}")
        if self.kind is GrammarKind.JSON_SCHEMA:
            _check_object(self.text)

    @classmethod
    def one_of(cls, texts: Sequence[str]) -> "Grammar":
        """The grammar of a choice: the whole text is one of `texts`.

        Raises InvalidRequest for no text, an empty text, or too many.
        """
        # Count first: the time to write the texts as JSON grows with their number.
        if not 1 <= len(texts) <= MAX_CHOICE_TEXTS:
            raise InvalidRequest(f"choice has {len(texts)} texts; give 1 to {MAX_CHOICE_TEXTS}")
        listed = list(texts)  # a message's field has no `index`
        if "" in listed:
            raise InvalidRequest(
                f"choice has an empty text, number {listed.index('')}; every text needs a character"
            )
        return cls(GrammarKind.CHOICE, json.dumps(listed, ensure_ascii=False))

    def parts(self) -> Mapping[str, "Grammar"]:
        """The grammars of the preamble, if there is one, and of the text, by the names that requests use."""
        if not self.preamble:
            return {self.kind: self}
        before = Grammar(GrammarKind.LARK, self.preamble)
        return {"preamble": before, self.kind: replace(self, preamble="")}

    def texts(self) -> tuple[str, ...]:
        """The texts of a choice."""
        return tuple(json.loads(self.text))

    def check_with(self, params: SamplingParams) -> None:
        """Raises InvalidRequest for sampling parameters that contradict a grammar."""
        if params.ignore_eos:
            raise InvalidRequest(
                f"ignore_eos cannot be together with {self.kind}: a complete text would have to go on; "
                f"leave one of them out"
            )


class ForcedToken(NamedTuple):
    """A token of a text that a grammar forces."""

    token: int
    only: bool
    """Whether the grammar allows no other id; else it forces the bytes, which other ids could write too."""


class Matcher(Protocol):
    """The state of one session's grammar after the session's committed ids."""

    def allowed(self, path: Sequence[int]) -> NDArray[np.bool_]:
        """Mask of the ids that may follow the committed ids and `path`: bool[V], read-only for the caller.

        End-of-sequence ids are allowed where the text is complete, and are alone where nothing may follow.
        The call changes no state that a caller can see. Each id of `path` was allowed at its place.

        Raises:
            EmptySupport: no id may follow, or finding out would cost too much.
        """

    def forced(self, most: int) -> Sequence[ForcedToken]:
        """The chain of at most `most` tokens in which the forced text after the committed ids goes on.

        Where several ids could write the next bytes, the longest is taken, as tokenizers mostly do. Empty
        where the grammar leaves a choice of bytes, or allows nothing.
        """

    def off_path_matcher(self) -> "Matcher | None":
        """A second matcher in the same state, for questions about texts other than the output; None: no such.

        Such questions use up none of this matcher's limits. Valid until the next `commit`.
        """

    def commit(self, tokens: Sequence[int]) -> None:
        """Advances over committed ids, each of which was allowed at its place."""


def without_literals(lark: str) -> str:
    """A Lark grammar without strings, comments and regular expressions, in which operators mean nothing."""
    return _LITERALS.sub("", lark)


def _check_object(text: str) -> None:
    try:
        found = json.loads(text)
    except RecursionError:
        raise InvalidRequest("json_schema is nested too deeply") from None
    except ValueError as error:
        raise InvalidRequest(f"json_schema is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise InvalidRequest(f"json_schema is {text[:40]!r}; it must be a JSON object")
