"""Colours of sources on a terminal. Without a terminal, or with NO_COLOR, text has no colours."""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from outrider.wire.names import LOOKUP_BELOW, TARGET

if TYPE_CHECKING:
    from rich.console import Console

STYLES = {
    TARGET: "default",
    "lookup": "bold green",
    "drafter": "bold cyan",
    "corpus": "bold yellow",
    "past": "bold magenta",
}
_ALIKE = {LOOKUP_BELOW: "lookup"}
"""Sources in the colour of another one."""
_OTHER = "magenta"
"""Style of sources without a style of their own."""
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


def print_legend(console: "Console") -> None:
    """Prints the sources in their colours."""
    console.print("every token in the colour of who proposed it:", end="")
    for source, style in STYLES.items():
        console.out(f" {source}", style=style, end="", highlight=False)
    console.print()


def print_from(console: "Console", text: str, source: str) -> None:
    """Prints a piece of an answer in its source's colour; control characters are replaced."""
    shown = "".join(c if c.isprintable() or c in "\n\t" else _UNFINISHED for c in text)
    console.out(shown, style=STYLES.get(_ALIKE.get(source, source), _OTHER), end="", highlight=False)


def texts_by_source(
    text: str, ids: Sequence[int], sources: Sequence[str], text_of: Callable[[Sequence[int]], str]
) -> Iterator[tuple[str, str]]:
    """Splits a chunk's text among the sources of its tokens: pieces with their sources, in order.

    The pieces join to exactly `text`. A character made of several tokens belongs to the last of these tokens.

    Args:
        text_of: gives the text of token ids; called only if a chunk has several sources.
    """
    runs = [
        (source, [id_ for id_, _ in run]) for source, run in groupby(zip(ids, sources, strict=True), _second)
    ]
    for source, run in runs[:-1]:
        piece = text_of(run).rstrip(_UNFINISHED)
        if piece and text.startswith(piece):
            text = text[len(piece) :]
            yield piece, source
    if text:
        yield text, runs[-1][0] if runs else TARGET


def _second(pair: tuple[int, str]) -> str:
    return pair[1]
