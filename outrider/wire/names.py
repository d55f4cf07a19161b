"""Valid names of sources and corpora, and valid addresses: one rule for everyone who takes them."""

import re
from collections.abc import Sequence

from speculative.errors import InvalidRequest

TARGET = "target"
"""Name for tokens that no source drafted; reserved, so no source may have it."""
PREDICTION = "prediction"
"""Name of the source inside verifiers that copies from the request's own prediction of its answer."""
REFERENCES = "references"
"""Name of the source inside verifiers that copies from the texts that come with the request."""
GRAMMAR = "grammar"
"""Name of the source inside verifiers that drafts what the request's grammar forces."""
LOOKUP_BELOW = "lookup-below"
"""Name of the source inside verifiers that looks up what follows the leaves of other sources' drafts."""
MAX_REFERENCES = 16
"""The most references of a request."""
EDGE = "edge"
"""Name of the source that stands for clients' devices; orchestrators alone serve it."""
MAX_SOURCE_NAME = 64
MAX_SOURCES = 16
"""The most sources that draft for one session."""
MAX_CORPORA = 16
_CORPUS = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HOST_PORT = re.compile(r"([A-Za-z0-9._-]+|\[[0-9a-fA-F:.]+\]):([0-9]{1,5})")
_SCHEMES = frozenset({"dns", "fd", "ipv4", "ipv6", "passthrough", "unix", "unix-abstract", "vsock", "xds"})
"""Words before a colon that gRPC does not read as a host: unix:1 is a file."""
_LONGEST_ADDRESS = 255


def checked_source_name(name: str) -> str:
    """The source's name. Raises InvalidRequest where it is invalid; a comma would separate two names."""
    if not 1 <= len(name) <= MAX_SOURCE_NAME:
        raise InvalidRequest(f"a source's name has {len(name)} characters; 1 to {MAX_SOURCE_NAME} are needed")
    if not name.isprintable() or "," in name or name != name.strip():
        raise InvalidRequest(
            f"{name!r} cannot name a source: printable characters, no comma, no space at either end"
        )
    if name == TARGET:
        raise InvalidRequest(f"{name!r} cannot name a source: it is what the target itself is called")
    return name


def checked_corpus_name(name: str) -> str:
    """The corpus' name, which its folder has too. Raises InvalidRequest where it is invalid."""
    if not _CORPUS.fullmatch(name):
        raise InvalidRequest(
            f"{name!r} cannot name a corpus: 1 to 64 letters, digits, dots, dashes and underscores, a letter "
            f"or digit first"
        )
    return name


def checked_corpora(names: Sequence[str]) -> tuple[str, ...]:
    """Names of corpora without duplicates. Raises InvalidRequest for a bad name or more than 16 names."""
    if len(names) > MAX_CORPORA:
        raise InvalidRequest(f"there are {len(names)} corpora; name at most {MAX_CORPORA}, or none for all")
    return tuple(dict.fromkeys(map(checked_corpus_name, names)))


def is_host_port(address: str) -> bool:
    """Whether an address is a host:port that a channel can dial; an IPv6 host stands in brackets."""
    found = _HOST_PORT.fullmatch(address) if len(address) <= _LONGEST_ADDRESS else None
    return found is not None and found[1].lower() not in _SCHEMES and 1 <= int(found[2]) <= 65535
