"""The benchmark's own parts: what it renames, and how it counts."""

import ast
import sys
from pathlib import Path
from typing import Any

from benchmarks.retrieval.renamed_source import renamed
from benchmarks.retrieval.teacher_forced import WrittenPrompt, acceptance_length, accepted
from retrieval_service.trie import counted

SOURCE = '''"""A queue."""
import os

LIMIT = 8  # the most


class Queue:
    """Things that wait."""

    def __init__(self, max_size=LIMIT):
        self._max_size = max_size
        self.items = []

    def put(self, value, *, at=None):
        # one more
        self.items.append(value)
        return f"{os.sep}{value}" + "value"


def main():
    queue = Queue(max_size=3)
    for number, _ in enumerate(range(4)):
        queue.put(value=number)
'''


def shape(node: ast.AST) -> Any:
    """A tree without names and docstrings."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return "text"
    parts = [shape(child) for child in ast.iter_child_nodes(node)]
    return type(node).__name__, parts


def test_a_renamed_file_is_the_same_program_in_other_words() -> None:
    new = renamed(SOURCE)
    assert shape(ast.parse(new)) == shape(ast.parse(SOURCE))
    for gone in ("Queue", "max_size", "items", "number", "the most", "one more", "wait"):
        assert gone not in new
    for kept in ("os.sep", "self", "__init__", "enumerate", "append", '"value"'):
        assert kept in new
    assert renamed(SOURCE) == new
    assert renamed(SOURCE, seed=1) != new
    first, second = new.splitlines(), SOURCE.splitlines()
    indents = [len(line) - len(line.lstrip()) for line in second]
    assert [len(line) - len(line.lstrip()) for line in first] == indents


def test_library_modules_stay_programs_when_renamed() -> None:
    for module in ("heapq", "textwrap", "queue", "csv"):
        text = Path(str(sys.modules.get(module, __import__(module)).__file__)).read_text()
        assert shape(ast.parse(renamed(text))) == shape(ast.parse(text))


def test_what_is_accepted_is_a_path_from_the_root() -> None:
    trie = counted([[1, 2, 3], [1, 5]], 1, 16)
    assert [accepted(trie, ids) for ids in ([1, 2, 3, 4], [1, 5, 3], [2, 3], [], [1, 2])] == [
        3,
        2,
        0,
        0,
        2,
    ]
    assert accepted(None, [1]) == 0


def test_an_acceptance_length_is_tokens_by_rounds() -> None:
    written = [WrittenPrompt("it", (1, 2, 3), tuple(range(10, 22)))]
    assert acceptance_length(written, lambda _: lambda _: None) == 1.0

    def perfect(one: Any) -> Any:
        whole = [*one.prompt, *one.continuation]
        return lambda ids: counted([whole[len(ids) : len(ids) + 3]], 1, 16)

    assert acceptance_length(written, perfect) == 4.0
