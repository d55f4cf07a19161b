"""Lines of JSON whose texts hold what other programs take for line ends."""

import json

from outrider.json_lines import json_lines


def test_a_line_ends_only_at_a_line_feed() -> None:
    texts = ["a\u2028b", "\u0085", "c\x1cd\r"]
    content = "".join(json.dumps(text, ensure_ascii=False) + "\n" for text in texts)
    assert [json.loads(line) for line in json_lines(content)] == texts


def test_an_empty_file_has_no_lines() -> None:
    assert json_lines("") == []
