"""API keys of clients: making, digesting and carrying them. Knows nothing of which client has which key."""

import hashlib
import secrets

from speculative.errors import InvalidRequest

HEADER = "authorization"
"""Name of the gRPC metadata and of the HTTP header that carry `Bearer KEY`."""
MAX_KEY = 4096
"""The most characters of an API key, or of a JSON Web Token in its place."""
_SCHEME = "bearer"


def new_key() -> str:
    """A new API key: 256 random bits as printable text."""
    return f"or-{secrets.token_urlsafe(32)}"


def key_digest(key: str) -> str:
    """SHA-256 of a key in hexadecimal, which servers keep in its place: safe because keys are random."""
    return hashlib.sha256(key.encode()).hexdigest()


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    """gRPC metadata that carry the key. Raises InvalidRequest, without the key, where it cannot be a key."""
    if not (0 < len(key) <= MAX_KEY and key.isascii() and key.isprintable() and " " not in key):
        raise InvalidRequest(
            f"the API key cannot be one: {len(key)} characters; 1 to {MAX_KEY} printable ones of ASCII, "
            "without spaces"
        )
    return ((HEADER, f"Bearer {key}"),)


def key_of(header: str) -> str | None:
    """The key in a header's value; None where the value is no bearer key."""
    scheme, _, key = header.strip().partition(" ")
    key = key.strip()
    return key if scheme.lower() == _SCHEME and 0 < len(key) <= MAX_KEY else None
