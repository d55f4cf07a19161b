"""What text is read, in which order, and what is left out."""

import io
import json
import os
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from outrider.tokens import TokenTable
from retrieval_service.corpus.build import build
from retrieval_service.corpus.encoding import TokenizedText, read_tokenizer
from retrieval_service.corpus.errors import BadSource
from retrieval_service.corpus.index import CorpusIndex
from retrieval_service.corpus.plan import CorpusSettings
from retrieval_service.corpus.texts import PIECE, TextSource

TOKENIZER = Path(__file__).resolve().parents[3] / "models/target"


@pytest.fixture(scope="module")
def table() -> TokenTable:
    return read_tokenizer(TOKENIZER)


def test_folders_are_read_in_order_of_their_names_without_hidden_ones(tmp_path: Path) -> None:
    for name in ("b.py", "a.py", "c.txt", "d/e.py", ".hidden.py", ".git/f.py", "__pycache__/g.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    os.mkfifo(tmp_path / "pipe.py")
    assert list(TextSource((tmp_path,))) == ["a.py", "b.py", "c.txt", "d/e.py"]
    assert list(TextSource((tmp_path,), ("*.py",))) == ["a.py", "b.py", "d/e.py"]
    assert list(TextSource((tmp_path / "c.txt", tmp_path), ("d/*",))) == ["c.txt", "d/e.py"]


@pytest.mark.parametrize(
    "rubbish", [b"\x7fELF\x02\x01\0\0", bytes(range(128, 256)) * 9, b"text\0text", os.urandom(5000)]
)
def test_binary_rubbish_is_left_out_and_counted(rubbish: bytes, tmp_path: Path) -> None:
    (tmp_path / "rubbish").write_bytes(rubbish)
    (tmp_path / "text").write_text("naïve text\r\n\twith a tab\f")
    (tmp_path / "empty").write_text("")
    source = TextSource((tmp_path,))
    assert list(source) == ["naïve text\r\n\twith a tab\f"]
    assert list(source) == ["naïve text\r\n\twith a tab\f"]
    assert source.left_out == {"binary files": 1}


def test_the_corpus_that_is_made_is_no_part_of_what_it_is_made_of(tmp_path: Path) -> None:
    for name in ("a.txt", "made/header.json", "made/lock", "b/made/c.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "link").symlink_to(tmp_path / "made")
    source = TextSource((tmp_path,), skip=(tmp_path / "b" / ".." / "made",))
    assert list(source) == ["a.txt", "b/made/c.txt"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_what_may_not_be_read_is_counted(tmp_path: Path) -> None:
    (tmp_path / "shut").mkdir(mode=0)
    (tmp_path / "shut.txt").touch(mode=0)
    source = TextSource((tmp_path,))
    assert list(source) == []
    assert source.left_out == {"unreadable folders": 1, "unreadable files": 1}
    (tmp_path / "shut").chmod(0o700)


def test_a_long_text_in_a_line_of_json_is_cut_after_a_line(tmp_path: Path) -> None:
    text = "a line\r\n" * (PIECE // 4)
    (tmp_path / "one.jsonl").write_text(json.dumps({"text": text}))
    pieces = list(TextSource((tmp_path,), jsonl_field="text"))
    assert "".join(pieces) == text
    assert len(pieces) > 1
    assert all(piece.endswith("\n") for piece in pieces)


@pytest.mark.parametrize("line", ["x" * (3 * PIECE + 5), "word " * PIECE, "line\n" * PIECE])
def test_a_huge_text_comes_in_pieces_and_nothing_is_lost(line: str, tmp_path: Path) -> None:
    (tmp_path / "huge").write_text(line)
    pieces = list(TextSource((tmp_path,)))
    assert "".join(pieces) == line
    assert len(pieces) > 3
    assert max(map(len, pieces)) <= PIECE
    if "\n" in line:
        assert all(piece.endswith("\n") for piece in pieces)


def test_json_lines_give_their_field_and_what_has_none_is_counted(tmp_path: Path) -> None:
    lines = [
        '{"text": "one"}',
        '{"text": 2}',
        '{"other": ""}',
        "[]",
        "{",
        "",
        '{"text": "\\ud800"}',
        "\udcff",
    ]
    (tmp_path / "lines").write_bytes("\n".join(lines).encode(errors="surrogateescape"))
    source = TextSource((tmp_path,), jsonl_field="text")
    assert list(source) == ["one", "?"]
    assert source.left_out == {"lines without text": 5}


def test_a_line_of_json_without_end_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retrieval_service.corpus.texts.LONGEST_LINE", 40)
    lines = [json.dumps({"text": "x" * length}) for length in (5, 200, 27, 6)]
    (tmp_path / "lines").write_text("\n".join(lines))
    source = TextSource((tmp_path,), jsonl_field="text")
    assert [len(text) for text in source] == [5, 27, 6]
    assert source.left_out == {"lines too long": 1}


def test_standard_input_is_text_or_json_lines() -> None:
    assert list(TextSource((), stdin=io.BytesIO("für".encode()))) == ["für"]
    assert list(TextSource((), (), "t", io.BytesIO(b'{"t": "a"}\n{"t": "b"}'))) == ["a", "b"]


def test_a_source_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadSource, match=r"nowhere: neither a file nor a folder"):
        list(TextSource((tmp_path / "nowhere",)))


def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(BadSource, match=r"tokenizer\.json: no tokenizer"):
        read_tokenizer(tmp_path)
    with pytest.raises(BadSource, match="nothing: no tokenizer"):
        read_tokenizer(tmp_path / "nothing")


def test_near_copies_of_what_is_excluded_are_left_out(
    tmp_path: Path, table: TokenTable, folder: Path
) -> None:
    kept = "".join(f"def kept_{n}(value):\n    return value * {n} + offset\n\n" for n in range(60))
    secret = "".join(f"class Secret{n}(Base):\n    field_{n} = Column('{n}')\n\n" for n in range(60))
    for name, text in {
        "in/kept.py": kept,
        "in/copy.py": kept[:400] + secret,
        "out/secret.py": secret,
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    source = TokenizedText(TextSource((tmp_path / "in",)), table, TextSource((tmp_path / "out",)))
    built = build(folder, CorpusSettings(table.digest, table.size, None), source)
    assert built.left_out == {"near-copies": 1}
    index = CorpusIndex.open(folder, table.digest)
    tokenizer = Tokenizer.from_str(table.to_json())
    ids = tokenizer.encode("class Secret7(Base):\n    field_7 = Column(", add_special_tokens=False).ids
    found = index.lookup(ids, node_limit=9, depth=4)
    assert found is None or found.match_length < 10
    ids = tokenizer.encode(kept[:600], add_special_tokens=False).ids
    found = index.lookup(ids[:100], node_limit=9, depth=4)
    assert found is not None
    assert list(found.tokens) == ids[100:104]
