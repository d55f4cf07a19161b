"""Largest values of a request's fields; without imports, so that processes that read bodies stay small."""

MAX_TOP_LOGPROBS = 20
MAX_SCHEMA_BYTES = 65_536
MAX_REGEX_BYTES = 8_192
