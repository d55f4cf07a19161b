"""Prompts for measuring acceptance."""

from pathlib import Path

import pytest

from outrider.pair.texts import OWN, prompts
from outrider.tokens import TokenTable
from speculative.errors import InvalidRequest
from tests.conftest import writing_tokenizer


@pytest.fixture(scope="module")
def table() -> TokenTable:
    return TokenTable.from_json(writing_tokenizer().to_str())


def test_without_a_file_the_built_in_prompts_are_used(table: TokenTable) -> None:
    found = prompts(table, None, 100, 16)
    assert len(found) == len(OWN)
    assert all(0 < len(ids) <= 16 for ids in found)
    assert len(prompts(table, None, 2, 16)) == 2


def test_a_text_is_cut_into_pieces_that_lie_apart(table: TokenTable, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(map(str, range(1000))))
    ids = table.encode(text.read_text())
    found = prompts(table, text, 4, 50)
    assert [len(piece) for piece in found] == [50] * 4
    assert found[0] == ids[:50]
    assert found[1] == ids[len(ids) // 4 : len(ids) // 4 + 50]


def test_a_short_text_is_one_prompt(table: TokenTable, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("short text")
    assert len(prompts(table, tmp_path / "text", 4, 50)) == 1


def test_lines_of_json_are_a_prompt_each(table: TokenTable, tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text('{"prompt": "one"}\n{"prompt": "two", "more": 1}\n')
    assert prompts(table, text, 9, 50) == [table.encode("one"), table.encode("two")]


def test_a_prompt_may_hold_characters_that_other_programs_take_for_line_ends(
    table: TokenTable, tmp_path: Path
) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text('{"prompt": "one\u2028two"}\r\n{"prompt": "three\x85four"}\n', encoding="utf-8")
    assert prompts(table, text, 9, 50) == [table.encode("one\u2028two"), table.encode("three\x85four")]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("none.txt", None, "cannot be read"),
        ("a.txt", b"\xff", "cannot be read"),
        ("a.txt", b"", "has 0 ids"),
        ("a.jsonl", b'{"prompt": "x"}\nnonsense\n', "line 2: not a JSON object"),
        ("a.jsonl", b'["x"]\n', "line 1: not a JSON object"),
        ("a.jsonl", b"", "has no prompts"),
        ("a.jsonl", b'{"prompt": 3}\n', "has no prompts"),
    ],
)
def test_an_unusable_text_is_named(
    table: TokenTable, tmp_path: Path, name: str, content: bytes | None, says: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidRequest, match=says):
        prompts(table, tmp_path / name, 4, 50)
