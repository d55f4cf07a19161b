"""Turns text into token ids and each id into its bytes, from a `tokenizer.json` alone.

This module knows nothing of models, prompts' templates, transformers or torch: the orchestrator runs on it.
Generated text continues a prompt, so no id counts as the first of a text: where a tokenizer drops the space
before a text's first word, `token_bytes` keeps that space.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

from tokenizers import Tokenizer


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """Template that makes a prompt of a conversation, from a tokenizer's configuration."""

    source: str
    """The template's text, in the language of Jinja 2."""
    tokens: Mapping[str, str] = field(default_factory=dict)
    """Names of special tokens that the template may use, such as bos_token, to their text."""
    response: str = ""
    """The tokenizer's response template as JSON, by which transformers parses answers; empty: it has none."""


def split_revision(name: str) -> tuple[str, str | None]:
    """Splits a Hugging Face id, ORG/NAME@REVISION, into name and revision; None without a revision."""
    bare, at, revision = name.partition("@")
    return bare, revision if at else None


SCREENED = 4
"""Characters for each token that a text may have, above which the text is screened before it is tokenized."""
PIECE = 65_536
"""Characters of a piece in which a text is screened."""


class TooManyTokens(ValueError):
    """A text has more tokens than are wanted."""

    def __init__(self, count: int) -> None:
        super().__init__(f"the text has at least {count} tokens")
        self.count = count
        """Tokens that were found, of the text or of its beginning."""


BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""Name of a token that stands for one byte, as in sentencepiece vocabularies."""


class TokenTable:
    """A tokenizer as a table of ids, their bytes and a digest.

    Special ids have no bytes, and neither have ids that the tokenizer lacks (a model's padded width).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._ids: dict[int, str] = {id_: token for token, id_ in tokenizer.get_vocab().items()}
        added = tokenizer.get_added_tokens_decoder()
        self._added = frozenset(token.content for token in added.values())
        self._special = frozenset(id_ for id_, token in added.items() if token.special)
        self._to_bytes = _decoder_of(tokenizer)
        self._known: dict[int, bytes] = {}

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Reads the contents of a `tokenizer.json`. Raises ValueError where the text is none."""
        try:
            return cls(Tokenizer.from_str(text))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"not a tokenizer.json: {error}") from error

    def to_json(self) -> str:
        """The tokenizer as the JSON text that `from_json` reads."""
        return self._tokenizer.to_str()

    def encode(self, text: str, *, add_special: bool = True, most: int | None = None) -> list[int]:
        """Token ids of a prompt, with or without the special tokens that the tokenizer adds.

        Other threads run meanwhile. Raises TooManyTokens for more than `most` tokens; how long that takes
        depends on `most`, not on the length of the text.
        """
        if most is not None and len(text) > SCREENED * most:
            self._screen(text, most)
        # Of the library's methods, only those for several texts release the interpreter lock.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special)
        if most is not None and len(encoding) > most:
            raise TooManyTokens(len(encoding))
        return encoding.ids

    def _screen(self, text: str, most: int) -> None:
        """Raises TooManyTokens where pieces of the text have a quarter more tokens than the whole may have.

        A piece's ends may have some tokens that the whole text has not, but never as many as the piece.
        """
        count = 0
        for start in range(0, len(text), PIECE):
            piece = text[start : start + PIECE]
            count += len(self._tokenizer.encode_batch_fast([piece], add_special_tokens=False)[0])
            if count > most + most // 4 + PIECE:
                raise TooManyTokens(count)

    def token(self, id_: int) -> str:
        """The tokenizer's own name of an id; empty for an unknown id."""
        return self._ids.get(id_, "")

    def token_bytes(self, id_: int) -> bytes:
        """Bytes that an id adds to a text that has begun; empty for special and for unknown ids."""
        known = self._known.get(id_)
        if known is None:
            known = self._known[id_] = self._find_bytes(id_)
        return known

    def _find_bytes(self, id_: int) -> bytes:
        token = self._ids.get(id_)
        if token is None or id_ in self._special:
            return b""
        return self._to_bytes(token) if self._to_bytes else self._by_difference(id_)

    @property
    def added_tokens(self) -> frozenset[str]:
        """Texts of the tokens that were added to the vocabulary: each stands for itself in every text."""
        return self._added

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of special tokens, which stand for no text."""
        return self._special

    @cached_property
    def size(self) -> int:
        """Number of ids: the highest id plus one."""
        return max(self._ids, default=-1) + 1

    @cached_property
    def longest_token_bytes(self) -> int:
        """Number of bytes of the longest token."""
        return max((len(self.token_bytes(id_)) for id_ in self._ids), default=0)

    @cached_property
    def digest(self) -> str:
        """SHA-256, hexadecimal, of the lines "id<tab>token" in order of id.

        Two tokenizers have the same digest when each id stands for the same token in both, whatever the
        widths of the models that use them.
        """
        lines = "".join(f"{id_}\t{token}\n" for id_, token in sorted(self._ids.items()))
        return hashlib.sha256(lines.encode()).hexdigest()

    def _by_difference(self, id_: int) -> bytes:
        """Bytes that an id adds after another id; without a decoder, or with one that looks at neighbours."""
        before = self._tokenizer.decode([self._anchor])
        both = self._tokenizer.decode([self._anchor, id_])
        return (both[len(before) :] if both.startswith(before) else self._ids[id_]).encode()

    @cached_property
    def _anchor(self) -> int:
        """An ordinary id whose token is a plain word."""
        ordinary = [(id_, token) for id_, token in sorted(self._ids.items()) if id_ not in self._special]
        return next((id_ for id_, token in ordinary if token.isalpha()), ordinary[0][0])


def _decoder_of(tokenizer: Tokenizer) -> Callable[[str], bytes] | None:
    """The function from a token to its bytes; None unless the decoder treats tokens one by one."""
    described = json.loads(tokenizer.to_str()).get("decoder")
    steps = _flatten(described) if described else []
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level
    if not steps or not set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace", "BPEDecoder"}:
        return None
    if "Strip" in kinds and ("Fuse" not in kinds or kinds.index("Strip") < kinds.index("Fuse")):
        return None
    replacements: list[tuple[str, str]] = []
    for step in steps:
        if step["type"] == "Replace":
            if "String" not in step["pattern"]:
                return None
            replacements.append((step["pattern"]["String"], step["content"]))
        elif step["type"] == "Metaspace":
            replacements.append((step["replacement"], " "))
        elif step["type"] == "BPEDecoder":
            replacements.append((step["suffix"], " "))
    return _Replacing(tuple(replacements), byte_fallback="ByteFallback" in kinds)


def _flatten(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] == "Sequence":
        return [step for inner in decoder["decoders"] for step in _flatten(inner)]
    return [decoder]


class _Replacing:
    """Decoder of sentencepiece vocabularies: a mark stands for a space, and <0x41> for one byte."""

    def __init__(self, replacements: tuple[tuple[str, str], ...], byte_fallback: bool) -> None:
        self._replacements = replacements
        self._byte_fallback = byte_fallback

    def __call__(self, token: str) -> bytes:
        if self._byte_fallback and (found := BYTE_TOKEN.fullmatch(token)):
            return bytes([int(found[1], 16)])
        for old, new in self._replacements:
            token = token.replace(old, new)
        return token.encode()


def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: a character per byte, itself where printable, else a character from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if chr(byte) not in table)
    return table | {chr(0x100 + n): byte for n, byte in enumerate(list(others))}


BYTES = _byte_of_character()


def _byte_level(token: str) -> bytes:
    """Bytes of a token in GPT-2's alphabet; a token with any other character is plain text."""
    try:
        return bytes([BYTES[character] for character in token])
    except KeyError:
        return token.encode()
