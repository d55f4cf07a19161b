"""llguidance behind the core's protocol: one target's vocabulary, and matchers for its sessions.

Every session compiles its grammar anew, and once more to look ahead with. The library's copies of one
compiled grammar share the lexer's states and the limit on their number, so the work of one session would
decide when another one fails. A mask takes states, and gives the next token its fuel. So a matcher computes a
mask for each token, as in plain decoding, even if a draft or another verifier brought the token.
"""

import json
import re
from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher, regex_to_lark
from numpy.typing import NDArray

from outrider.tokens import TokenTable
from speculative.errors import DeadEnd, EmptySupport, InvalidRequest
from speculative.grammar import ForcedToken, Grammar, GrammarKind, without_literals
from verifier_service.grammar.forcing import forced_tokens
from verifier_service.grammar.trial import TRIED_ID, Vocabulary, matcher
from verifier_service.grammar.vetting import readable

# Forced tokens would depend on how a tokenizer splits text. Without them a mask is a function of bytes alone.
_OPTIONS = '%llguidance {"no_forcing": true}\n'
_SPECIAL_ID = re.compile(r"<\[(\d{1,9})\]>")
"""A special token in a Lark grammar."""


def written(grammar: Grammar, name: str = "") -> str:
    """The grammar in the library's language. Raises InvalidRequest for a grammar that has no such form.

    Args:
        name: what requests call a grammar that is one part of theirs; empty: its kind.
    """
    if not grammar.preamble:
        return _OPTIONS + _rules(grammar, name or grammar.kind)
    before, text = (_rules(part, part_name) for part_name, part in grammar.parts().items())
    return f"{_OPTIONS}start: before text\nbefore: %lark {{\n{before}\n}}\ntext: %lark {{\n{text}\n}}"


def _rules(grammar: Grammar, name: str) -> str:
    """The rules of a grammar without preamble, from the rule `start` on."""
    match grammar.kind:
        case GrammarKind.JSON_OBJECT:
            return 'start: %json {"type": "object"}'
        case GrammarKind.JSON_SCHEMA:
            schema = json.loads(grammar.text)
            if "x-guidance" in schema:
                raise InvalidRequest("json_schema has x-guidance, which is no part of JSON Schema")
            return f"start: %json {json.dumps(schema)}"
        case GrammarKind.REGEX:
            text = grammar.text
            if (len(text) - len(text.rstrip("\\"))) % 2:
                raise InvalidRequest("regex ends with a backslash that escapes nothing")
            return f"start: /{regex_to_lark(text, '')}/"
        case GrammarKind.CHOICE:
            # A terminal, so that the lexer sees all texts at once, even if many texts begin alike.
            return f"start: CHOICE\nCHOICE: {' | '.join(map(json.dumps, grammar.texts()))}"
        case GrammarKind.LARK:
            return _lark(grammar.text, name)


def _lark(text: str, name: str) -> str:
    """A client's grammar, checked for options of the server and for special tokens."""
    if "%llguidance" in text:
        raise InvalidRequest(f"{name} has %llguidance, which only the server may set; leave it out")
    bare = without_literals(text)
    if special := re.search(r"<(?!\[\d{1,9}\]>)[^\s>]*>", bare):
        raise InvalidRequest(
            f"{name} has {special[0][:80]}: special tokens have no text that could match; write a special "
            "token as <[ID]>, or leave it out"
        )
    if "temperature" in bare:
        raise InvalidRequest(f"{name} has temperature; set the request's temperature instead")
    if not re.search(r"^\s*start\b", text, re.MULTILINE):
        gbnf = "; the text looks like GBNF, which is another language" if "::=" in text else ""
        raise InvalidRequest(f"{name} has no rule `start`, with which a grammar begins{gbnf}")
    return text


def for_trial(written_grammar: str) -> str:
    """The grammar for the trial's own vocabulary, which has one special token."""
    return _SPECIAL_ID.sub(f"<[{TRIED_ID}]>", written_grammar)


class MatcherFactory:
    """Builds the matchers of one target.

    Args:
        tokens: of the target's tokenizer.
        end_ids: the target's end-of-sequence ids, at least one.
        vocabulary_size: width of the target's logits; ids that the tokenizer lacks are never allowed.
    """

    def __init__(self, tokens: TokenTable, end_ids: Sequence[int], vocabulary_size: int) -> None:
        size = max(tokens.size, *(id_ + 1 for id_ in end_ids))
        table = [b"" if id_ in end_ids else tokens.token_bytes(id_) for id_ in range(size)]
        special = sorted(tokens.special_ids | set(end_ids))
        vocabulary = Vocabulary(table, special, list(end_ids))
        self._tokens = list(vocabulary.tokens)
        for id_ in special:  # without names of their own, the library takes one special token for another
            vocabulary.tokens[id_] = f"<{id_}>".encode()
        self._special_ids = tokens.special_ids - set(end_ids)
        self._tokenizer = vocabulary.tokenizer()
        self._vocabulary_size = vocabulary_size

    def matcher(self, grammar: Grammar, generated: Sequence[int]) -> "LibraryMatcher":
        """Compiles a grammar; the matcher stands after the `generated` tokens. Blocks while it compiles.

        Raises InvalidRequest where the grammar allows no text, or not these tokens.
        """
        for name, part in grammar.parts().items():
            self._check_special(part, name)
        made, off_path = (self._compiled(grammar) for _ in range(2))
        for number, token in enumerate(generated):
            made.compute_bitmask()
            if not made.consume_token(token):
                raise InvalidRequest(
                    f"generated id {token} (number {number}) is none that {grammar.kind} allows there"
                )
        follows = all(map(off_path.consume_token, generated))
        found = LibraryMatcher(made, self._tokens, self._vocabulary_size, off_path if follows else None)
        if not generated:
            try:
                found.allowed(())
            except EmptySupport as error:
                raise InvalidRequest(f"{grammar.kind} cannot be used: {error}") from error
        return found

    def _compiled(self, grammar: Grammar) -> LLMatcher:
        made = matcher(self._tokenizer, written(grammar))
        if made.is_error():
            for name, part in grammar.parts().items():  # apart, by the lines of the client's own text
                alone = matcher(self._tokenizer, written(part, name))
                if alone.is_error():
                    raise InvalidRequest(f"{name} cannot be used: {readable(alone.get_error())}")
            raise InvalidRequest(
                f"{' and '.join(grammar.parts())} cannot be used together: {readable(made.get_error())}"
            )
        return made

    def _check_special(self, grammar: Grammar, name: str) -> None:
        if grammar.kind is not GrammarKind.LARK:
            return
        for id_ in map(int, _SPECIAL_ID.findall(without_literals(grammar.text))):
            if id_ not in self._special_ids:
                raise InvalidRequest(
                    f"{name} has <[{id_}]>, but {id_} is no special token that may stand in a text; use the "
                    "id of another special token, or leave it out"
                )


class LibraryMatcher:
    """A `Matcher` of the core. For one thread at a time.

    Args:
        committed: the library's matcher, after all committed ids.
        tokens: bytes of each id of the tokenizer.
        vocabulary_size: width of the target's logits.
        off_path: a second compiled copy in the same state, for questions off the output's path; None: such
            questions get no answer.
    """

    def __init__(
        self,
        committed: LLMatcher,
        tokens: Sequence[bytes],
        vocabulary_size: int,
        off_path: LLMatcher | None = None,
    ) -> None:
        self._committed = committed
        # Questions about other texts use up lexer states. If they used those of the session's own matcher,
        # the output would reach the limit, and end, some tokens earlier than in plain decoding.
        self._off_path = None if off_path is None else LibraryMatcher(off_path, tokens, vocabulary_size)
        self._unread: list[int] = []
        """Committed tokens that `_off_path` does not have yet."""
        self._tokens = tokens
        self._vocabulary_size = vocabulary_size
        self._drafted = committed
        self._path: tuple[int, ...] = ()
        """The drafted tokens between `_committed` and `_drafted`."""
        self._masks: dict[tuple[int, ...], bytes] = {}
        """Masks of this round by drafted path: a match that is walked twice asks twice."""

    def allowed(self, path: Sequence[int]) -> NDArray[np.bool_]:
        """Which tokens the grammar allows after the drafted `path`: bool[V]. Raises DeadEnd for none."""
        after = tuple(path)
        known_mask = self._masks.get(after)
        if known_mask is not None:
            return self._unpacked(known_mask)
        at = self._after(after)
        mask = at.compute_bitmask()
        allowed = self._unpacked(mask)
        error = at.get_error()
        if error and "NoExtension" not in error:
            raise DeadEnd(f"the grammar cannot go on: {readable(error)}")
        if error or not allowed.any():
            raise DeadEnd("the grammar cannot go on with the ids that the target's tokenizer has")
        self._masks[after] = mask
        return allowed

    def forced(self, most: int) -> Sequence[ForcedToken]:
        """The forced text after the committed ids as at most `most` tokens; see `Matcher.forced`."""
        # Not by the library's own forced text: that is followed to its end, in a{100000} too.
        off_path = self.off_path_matcher()
        return () if off_path is None else forced_tokens(off_path.allowed, self._tokens, most)

    def off_path_matcher(self) -> "LibraryMatcher | None":
        """The second compiled copy, after all committed ids; see `Matcher.off_path_matcher`."""
        if self._off_path is not None and self._unread:
            unread, self._unread = self._unread, []
            try:
                self._off_path.skip(unread)
            except DeadEnd:
                self._off_path = None
        return self._off_path

    def commit(self, tokens: Sequence[int]) -> None:
        """Moves over committed tokens. Raises DeadEnd where the grammar does not allow one of them."""
        known = len(self._path)
        if tuple(tokens[:known]) == self._path:
            self._committed = self._drafted
        else:
            known = 0
        for number, token in enumerate(tokens[known:]):
            if number:  # `allowed` made the first token's mask
                self._committed.compute_bitmask()
            self._move(token)
        self._drafted, self._path = self._committed, ()
        self._masks.clear()
        if self._off_path is not None:
            self._unread += tokens

    def skip(self, tokens: Sequence[int]) -> None:
        """Moves over tokens without masks, so that fuel may run out. Raises DeadEnd as `commit` does."""
        for token in tokens:
            self._move(token)
        self._drafted, self._path = self._committed, ()
        self._masks.clear()

    def _move(self, token: int) -> None:
        if not self._committed.consume_token(token):
            raise DeadEnd(f"the grammar cannot go on: {readable(self._committed.get_error())}")

    def _after(self, path: tuple[int, ...]) -> LLMatcher:
        """The state after `path`. A round walks down one path, so the state is mostly one token further."""
        if not path:
            return self._committed
        known = len(self._path)
        if not known or path[:known] != self._path:
            # A copy, because an error in a state that is never committed must not stay.
            self._drafted, known = self._committed.deep_copy(), 0
        for token in path[known:]:
            self._drafted.consume_token(token)
        self._path = path
        return self._drafted

    def _unpacked(self, mask: bytes) -> NDArray[np.bool_]:
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
        allowed = np.zeros(self._vocabulary_size, np.bool_)
        known = min(len(bits), self._vocabulary_size)
        allowed[:known] = bits[:known]
        return allowed
