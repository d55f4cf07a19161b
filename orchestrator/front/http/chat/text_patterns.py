"""What a JSON schema asks of a string, as patterns of bare text in Lark's language. Pure.

`format` is not enforced: in JSON Schema it is a remark.
"""

from collections.abc import Mapping
from typing import Any


def text_patterns(schema: Mapping[str, Any]) -> list[str]:
    """Patterns between slashes, all of which the text of a string matches as a whole."""
    found = []
    if "minLength" in schema or "maxLength" in schema:
        found.append(f"/(?s:.{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}})/")
    if isinstance(pattern := schema.get("pattern"), str):
        found.append(f"/{_whole(pattern)}/")
    return found


def _whole(pattern: str) -> str:
    """The pattern of texts in which a pattern is found: JSON Schema searches, and Lark matches."""
    begin = end = "(?s:.*)"
    if not _has_alternatives(pattern):
        if pattern.startswith("^"):
            begin, pattern = "", pattern[1:]
        if pattern.endswith("$") and not _escaped_end(pattern):
            end, pattern = "", pattern[:-1]
    return f"{begin}(?:{_without_slashes(pattern)}){end}"


def _has_alternatives(pattern: str) -> bool:
    """Whether a pattern consists of alternatives, so that an anchor at its end belongs to one of them."""
    depth, in_class, skip = 0, False, False
    for character in pattern:
        if skip:
            skip = False
        elif character == "\\":
            skip = True
        elif in_class or character == "[":
            in_class = character != "]"
        elif character in "()":
            depth += 1 if character == "(" else -1
        elif character == "|" and depth <= 0:
            return True
    return False


def _escaped_end(pattern: str) -> bool:
    body = pattern[:-1]
    return bool((len(body) - len(body.rstrip("\\"))) % 2)


def _without_slashes(pattern: str) -> str:
    """The pattern with its bare slashes escaped, and its line ends as escapes."""
    written, skip = [], False
    for character in pattern:
        written.append("\\/" if character == "/" and not skip else character)
        skip = character == "\\" and not skip
    return "".join(written).replace("\n", r"\n")
