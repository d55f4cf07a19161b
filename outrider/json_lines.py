"""Files of JSON lines. Imports nothing heavy: the demonstration reads its prompts by this module."""


def json_lines(content: str) -> list[str]:
    """The lines of a file of JSON lines. `splitlines` would also split at other characters within a text."""
    return content.removesuffix("\n").split("\n") if content else []
