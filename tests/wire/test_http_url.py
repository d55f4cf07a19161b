"""URLs and headers that are none are told apart without an error."""

import pytest

from outrider.wire.incoming.http_url import http_url, named_host, path_of


@pytest.mark.parametrize("url", ["http://a:1/v1", "https://[::1]:8000", "http://a.example"])
def test_a_url_of_a_server_is_taken_apart(url: str) -> None:
    found = http_url(url)
    assert found is not None
    assert found.hostname in ("a", "::1", "a.example")


@pytest.mark.parametrize(
    "text",
    ["", "x", "ftp://a", "http://", "http://a:99999", "http://a:b", "http://a:0", "http://[", "http://a b"],
)
def test_other_text_is_no_url(text: str) -> None:
    assert http_url(text) is None


def test_a_header_or_target_that_names_nothing_names_nothing() -> None:
    assert [named_host(host) for host in ("a:1", "[::1]:80", "[", "", "[x]")] == ["a", "::1", "", "", ""]
    assert [path_of(target) for target in ("/a?b", "http://a/b?c", "http://[/b", "*")] == [
        "/a",
        "/b",
        "",
        "*",
    ]
