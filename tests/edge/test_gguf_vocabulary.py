"""A GGUF file's vocabulary has the digest of its tokenizer, and a file that is no GGUF is refused by name."""

import struct
from pathlib import Path

import pytest
from gguf import GGUFWriter, TokenType

from outrider.edge.backends.gguf_vocabulary import read_vocabulary, vocabulary_digest
from outrider.edge.top_k import DraftModelFailed
from outrider.tokens import TokenTable

DRAFTER = Path(__file__).parents[2] / "models" / "drafter"


def write(path: Path, tokens: list[str], types: list[int] | None = None, **numbers: int) -> Path:
    """A GGUF file with a vocabulary, behind metadata of other types that a reader has to skip."""
    writer = GGUFWriter(path, "llama")
    writer.add_name("näme")
    writer.add_rope_freq_base(1e4)
    writer.add_array("some.numbers", [1, 2, 3])
    writer.add_array("some.texts", ["one", "two"])
    if tokens:
        writer.add_token_list(tokens)
    if types is not None:
        writer.add_token_types(types)
    for name, number in numbers.items():
        writer.add_uint32(name, number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_a_converted_vocabulary_has_the_digest_of_its_tokenizer(tmp_path: Path) -> None:
    table = TokenTable.from_json((DRAFTER / "tokenizer.json").read_text())
    names = [table.token(id_) for id_ in range(table.size)]
    padded = [*names, "<|unused|>", "<|unused too|>"]  # a checkpoint's width exceeds its vocabulary
    types = [TokenType.NORMAL] * len(names) + [TokenType.UNUSED] * 2
    file = write(tmp_path / "model.gguf", padded, types, **{"tokenizer.ggml.eos_token_id": 0})
    assert vocabulary_digest(*read_vocabulary(file)) == table.digest


def test_one_token_of_another_name_or_at_another_place_changes_the_digest(tmp_path: Path) -> None:
    digests = {
        vocabulary_digest(*read_vocabulary(write(tmp_path / f"{number}.gguf", tokens)))
        for number, tokens in enumerate((["a", "b", "ü"], ["b", "a", "ü"], ["a", "b", "u"], ["a", "b"]))
    }
    assert len(digests) == 4


@pytest.mark.parametrize("length", [0, 3, 8, 23, 40, 120])
def test_a_file_that_ends_early_is_refused_by_name(tmp_path: Path, length: int) -> None:
    whole = write(tmp_path / "whole.gguf", ["a", "b"]).read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole[:length])
    with pytest.raises(DraftModelFailed, match=r"cut\.gguf cannot be read as a GGUF file"):
        read_vocabulary(cut)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"PK\x03\x04" + bytes(40), "does not begin like a GGUF"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 0, 1 << 60), "1152921504606846976 entries"),
        (struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, 1 << 40), "1099511627776 entries"),
        (struct.pack("<4sIQQQ1sI", b"GGUF", 3, 0, 1, 1, b"k", 77), "77"),
        (
            struct.pack("<4sIQQQ1sI", b"GGUF", 3, 0, 1, 1, b"k", 9) + struct.pack("<IQ", 9, 1) * 4000,
            "recursion",
        ),
    ],
    ids=["zip", "entries", "text", "type", "nested"],
)
def test_a_hostile_file_is_refused_without_reading_what_it_claims(
    tmp_path: Path, data: bytes, why: str
) -> None:
    file = tmp_path / "hostile.gguf"
    file.write_bytes(data)
    with pytest.raises(DraftModelFailed, match=why):
        read_vocabulary(file)


def test_a_file_without_a_vocabulary_says_so(tmp_path: Path) -> None:
    with pytest.raises(DraftModelFailed, match="has no vocabulary: convert the model with its tokenizer"):
        read_vocabulary(write(tmp_path / "bare.gguf", []))
    with pytest.raises(DraftModelFailed, match="has 2 tokens, but 1 types"):
        read_vocabulary(write(tmp_path / "short.gguf", ["a", "b"], [1]))
    with pytest.raises(DraftModelFailed, match="No such file"):
        read_vocabulary(tmp_path / "none.gguf")
