"""API keys of clients: making and carrying them."""

import pytest

from outrider.wire.keys import HEADER, bearer, key_digest, key_of, new_key
from speculative.errors import InvalidRequest


def test_keys_are_long_printable_and_never_the_same() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(len(key) >= 40 and key.isascii() and key.isprintable() for key in keys)


def test_a_key_comes_out_of_the_header_as_it_went_in() -> None:
    key = new_key()
    ((name, value),) = bearer(key)
    assert name == HEADER
    assert key_of(value) == key


@pytest.mark.parametrize("header", ["bearer k", "BEARER  k ", " Bearer k"])
def test_the_scheme_is_read_as_http_has_it(header: str) -> None:
    assert key_of(header) == "k"


@pytest.mark.parametrize("header", ["", "k", "Bearer", "Bearer ", "Basic k", "Bearer " + "k" * 4097])
def test_a_header_without_a_key_gives_none(header: str) -> None:
    assert key_of(header) is None


@pytest.mark.parametrize("key", ["", "a b", "a\nb", "é", "x" * 4097])
def test_an_invalid_key_is_refused_without_being_quoted(key: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        bearer(key)
    assert not key or key not in str(refused.value)


def test_a_digest_is_sha_256() -> None:
    assert key_digest("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
