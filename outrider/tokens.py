"""Text to token ids, and each id's own bytes, from a `tokenizer.json` alone.

Knows nothing of models, prompts' templates, transformers or torch: the orchestrator runs on it.
Generated text continues a prompt, so no id is treated as the first of a text: where a tokenizer drops the
space before a text's first word, `token_bytes` keeps it.
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
    """How a conversation becomes a prompt, as a tokenizer's configuration says."""

    source: str
    """In the template language of Jinja 2."""
    tokens: Mapping[str, str] = field(default_factory=dict)
    """What the template may name beside the messages: bos_token, eos_token, ..."""


def split_revision(name: str) -> tuple[str, str | None]:
    """A Hugging Face id, ORG/NAME@REVISION, in its parts; None where no revision is named."""
    bare, at, revision = name.partition("@")
    return bare, revision if at else None


BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenTable:
    """A tokenizer as a table of ids, their bytes and a digest.

    Ids that the tokenizer does not have (a model's padded width) and special ones have no bytes.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._ids: dict[int, str] = {id_: token for token, id_ in tokenizer.get_vocab().items()}
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(id_ for id_, token in added.items() if token.special)
        self._to_bytes = _decoder_of(tokenizer)
        self._known: dict[int, bytes] = {}

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Reads the contents of a `tokenizer.json`. Raises ValueError where they are none."""
        try:
            return cls(Tokenizer.from_str(text))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"not a tokenizer.json: {error}") from error

    def to_json(self) -> str:
        """What `from_json` reads."""
        return self._tokenizer.to_str()

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Ids of a prompt, with the special ones that this tokenizer adds, or without them."""
        return self._tokenizer.encode(text, add_special_tokens=add_special).ids

    def token(self, id_: int) -> str:
        """The tokenizer's own name of an id; empty for unknown ones."""
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
    def special_ids(self) -> frozenset[int]:
        """Ids that stand for no text."""
        return self._special

    @cached_property
    def size(self) -> int:
        """All ids are below this."""
        return max(self._ids, default=-1) + 1

    @cached_property
    def longest_token_bytes(self) -> int:
        """The most bytes that one id stands for."""
        return max((len(self.token_bytes(id_)) for id_ in self._ids), default=0)

    @cached_property
    def digest(self) -> str:
        """SHA-256, hexadecimal, of the lines "id<tab>token" in order of id.

        Two tokenizers agree on it when each id stands for the same token in both, however wide the models
        that use them are.
        """
        lines = "".join(f"{id_}\t{token}\n" for id_, token in sorted(self._ids.items()))
        return hashlib.sha256(lines.encode()).hexdigest()

    def _by_difference(self, id_: int) -> bytes:
        """For decoders that look at neighbours (WordPiece, none at all): what the id adds to another one."""
        before = self._tokenizer.decode([self._anchor])
        both = self._tokenizer.decode([self._anchor, id_])
        return (both[len(before) :] if both.startswith(before) else self._ids[id_]).encode()

    @cached_property
    def _anchor(self) -> int:
        """An ordinary id that decodes to a plain word."""
        ordinary = [(id_, token) for id_, token in sorted(self._ids.items()) if id_ not in self._special]
        return next((id_ for id_, token in ordinary if token.isalpha()), ordinary[0][0])


def _decoder_of(tokenizer: Tokenizer) -> Callable[[str], bytes] | None:
    """The function from a token to its bytes, where the tokenizer's decoder treats tokens one by one."""
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
    """Sentencepiece's way: a mark stands for a space, and <0x41> for one byte."""

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
    """GPT-2's alphabet: printable bytes stand for themselves, the others for characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if chr(byte) not in table)
    return table | {chr(0x100 + n): byte for n, byte in enumerate(list(others))}


BYTES = _byte_of_character()


def _byte_level(token: str) -> bytes:
    """Characters of the alphabet are bytes; a token with any other character is text as it stands."""
    try:
        return bytes([BYTES[character] for character in token])
    except KeyError:
        return token.encode()
