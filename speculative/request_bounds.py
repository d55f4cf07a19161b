"""Largest values of a request's fields; without imports, so that processes that read bodies stay small."""

MAX_TOP_LOGPROBS = 20
MAX_SCHEMA_BYTES = 65_536
MAX_REGEX_BYTES = 8_192
MAX_LARK_BYTES = 65_536
MAX_PREAMBLE_BYTES = 4_096
MAX_CHOICE_TEXTS = 1_024
MAX_CHOICE_BYTES = 65_536
"""Most bytes of all texts of a choice together, as a JSON array."""
MAX_INTERVAL_MS = 10_000
"""The most milliseconds between two messages that a client can ask for."""
