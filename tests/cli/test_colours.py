"""Answers in the colours of their sources: the text is never changed, and plain where nobody sees colours."""

import io
from collections.abc import Sequence

import pytest
from rich.console import Console

from outrider.cli.asking.colours import print_from, texts_by_source

WORDS = {
    1: "def ",
    2: "fib",
    3: "(n)",
    4: ":\n",
    5: "\N{REPLACEMENT CHARACTER}",
    6: "\N{REPLACEMENT CHARACTER}",
}


def text_of(ids: Sequence[int]) -> str:
    return "".join(WORDS[id_] for id_ in ids)


def unasked(ids: Sequence[int]) -> str:
    raise AssertionError("one source needs no text of tokens")


def test_each_run_of_a_source_has_its_own_text() -> None:
    sources = ["lookup", "lookup", "drafter", "target"]
    assert list(texts_by_source("def fib(n):\n", (1, 2, 3, 4), sources, text_of)) == [
        ("def fib", "lookup"),
        ("(n)", "drafter"),
        (":\n", "target"),
    ]


def test_a_chunk_of_one_source_asks_for_no_text() -> None:
    assert list(texts_by_source("def fib", (1, 2), ["lookup"] * 2, unasked)) == [("def fib", "lookup")]
    assert list(texts_by_source("", (5,), ["target"], unasked)) == []
    assert list(texts_by_source("left over", (), [], unasked)) == [("left over", "target")]


def test_a_character_of_two_tokens_belongs_to_the_last() -> None:
    assert list(texts_by_source("fibé", (2, 5, 6), ["drafter", "drafter", "target"], text_of)) == [
        ("fib", "drafter"),
        ("é", "target"),
    ]


def test_text_that_an_earlier_token_held_back_is_not_lost() -> None:
    pieces = list(texts_by_source("éfib(n)", (2, 3), ["drafter", "target"], text_of))
    assert "".join(piece for piece, _ in pieces) == "éfib(n)"


def test_colours_come_on_a_terminal_alone_and_not_with_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    def shown(*, terminal: bool) -> str:
        out = io.StringIO()
        console = Console(file=out, force_terminal=terminal, color_system="standard" if terminal else None)
        print_from(console, "x\x1b[2J", "drafter")
        return out.getvalue()

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "36m" in shown(terminal=True)
    assert shown(terminal=False) == "x\N{REPLACEMENT CHARACTER}[2J"
    monkeypatch.setenv("NO_COLOR", "1")
    assert "36m" not in shown(terminal=True)
