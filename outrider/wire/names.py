"""What a source may be called: one rule for those who name one, place it, or count by it."""

from speculative.errors import InvalidRequest

TARGET = "target"
"""Where a token comes from that no source drafted: no source may be called so."""
MAX_SOURCE_NAME = 64


def checked_source_name(name: str) -> str:
    """Raises InvalidRequest for what cannot be a source's name; commas part names where several are given."""
    if not 1 <= len(name) <= MAX_SOURCE_NAME:
        raise InvalidRequest(f"a source's name has {len(name)} characters; 1 to {MAX_SOURCE_NAME} are needed")
    if not name.isprintable() or "," in name or name != name.strip():
        raise InvalidRequest(
            f"{name!r} cannot name a source: printable characters, no comma, no space at either end"
        )
    if name == TARGET:
        raise InvalidRequest(f"{name!r} cannot name a source: it is what the target itself is called")
    return name
