"""Prompts for measuring acceptance: from a file of the user's, or built in."""

import json
from pathlib import Path

from outrider.json_lines import json_lines
from outrider.tokens import TokenTable
from speculative.errors import InvalidRequest

OWN = (
    'def read_settings(path):\n    """Read a settings file and return a dictionary."""\n    settings = {}\n',
    "class Queue:\n    def __init__(self, limit):\n        self.limit = limit\n        self.items = []\n\n"
    "    def put(self, item):\n",
    "A lighthouse keeper writes to his sister about the first storm of the winter. Dear Anna,",
    "Question: Why is the sky blue in the day and red in the evening?\nAnswer:",
    '{"name": "Ada", "born": 1815, "works": ["Notes"]}\n{"name": "Alan", "born": 1912, "works": [',
    "import unittest\n\nfrom shop import Basket\n\n\nclass BasketTest(unittest.TestCase):\n    def test_",
    "To replace the battery, first switch the device off and unplug it. Then open the cover and",
    "SELECT customers.name, SUM(orders.total) AS spent\nFROM customers\nJOIN orders ON",
)
"""Built-in prompts: Python, prose, JSON and SQL, written for this purpose."""
_LEAST_IDS = 4


def prompts(table: TokenTable, text: Path | None, count: int, length: int) -> list[list[int]]:
    """Token ids of up to `count` prompts of up to `length` tokens each, none empty.

    A .jsonl file gives the fields "prompt" of its lines, any other file pieces spread evenly over its text.
    Raises InvalidRequest where the file cannot be read or is too short.
    """
    if text is None:
        return [ids for one in OWN[:count] if (ids := table.encode(one)[-length:])]
    try:
        content = text.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"text {str(text)!r} cannot be read: {error}") from error
    if text.suffix == ".jsonl":
        return [table.encode(one)[-length:] for one in _listed(content, text)[:count]]
    ids = table.encode(content)
    if len(ids) < _LEAST_IDS:
        raise InvalidRequest(
            f"text {str(text)!r} has {len(ids)} ids: give at least {_LEAST_IDS}, better 1,000"
        )
    length = min(length, len(ids))
    count = max(1, min(count, len(ids) // length))
    begins = range(0, len(ids) - length + 1, max(1, len(ids) // count))
    return [ids[begin : begin + length] for begin in begins[:count]]


def _listed(content: str, text: Path) -> list[str]:
    found = []
    for number, line in enumerate(json_lines(content), start=1):
        try:
            prompt = json.loads(line)["prompt"]
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidRequest(
                f'{text}, line {number}: not a JSON object with a "prompt", as .jsonl has them'
            ) from error
        if isinstance(prompt, str) and prompt:
            found.append(prompt)
    if not found:
        raise InvalidRequest(f"text {str(text)!r} has no prompts")
    return found
