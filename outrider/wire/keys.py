"""Keys that clients show: how they are made, told apart and carried. Knows nothing of who has which."""

import hashlib
import secrets

from speculative.errors import InvalidRequest

HEADER = "authorization"
"""Metadata over gRPC, header over HTTP: `Bearer KEY`."""
MAX_KEY = 512
_SCHEME = "bearer"


def new_key() -> str:
    """256 random bits, printable."""
    return f"or-{secrets.token_urlsafe(32)}"


def key_digest(key: str) -> str:
    """SHA-256 in hexadecimal: what a server keeps of a key. Enough for keys that are random."""
    return hashlib.sha256(key.encode()).hexdigest()


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    """The metadata that carry it. Raises InvalidRequest, without the key, where none could."""
    if not (0 < len(key) <= MAX_KEY and key.isascii() and key.isprintable() and " " not in key):
        raise InvalidRequest(
            f"the API key cannot be one: {len(key)} characters; 1 to {MAX_KEY} printable ones of ASCII, "
            "without spaces"
        )
    return ((HEADER, f"Bearer {key}"),)


def key_of(header: str) -> str | None:
    """The key that a header carries; None where it carries something else."""
    scheme, _, key = header.strip().partition(" ")
    key = key.strip()
    return key if scheme.lower() == _SCHEME and 0 < len(key) <= MAX_KEY else None
