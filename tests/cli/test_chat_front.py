"""What `outrider chat` asks over HTTP: its key goes to the orchestrator alone."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from outrider.cli.access import Access
from outrider.cli.asking.chat import HttpFront
from outrider.cli.failures import CommandFailed


class Elsewhere(BaseHTTPRequestHandler):
    """Redirects /tokenize to the same server under another name, and keeps what that one was shown."""

    shown: list[str | None]

    def do_POST(self) -> None:
        self.send_response(302)
        self.send_header("Location", f"http://localhost:{self.server.server_address[1]}/elsewhere")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_GET(self) -> None:
        self.shown.append(self.headers.get("Authorization"))
        self.send_error(404)

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing."""


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, list[str | None]]]:
    """The server's URL, and the keys that it was shown after a redirect."""
    Elsewhere.shown = []
    monkeypatch.setenv("OUTRIDER_API_KEY", "or-secret")
    with ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", Elsewhere.shown
        server.shutdown()
        thread.join()


def test_a_redirect_gets_no_key_and_is_named(shown: tuple[str, list[str | None]]) -> None:
    url, keys = shown
    with pytest.raises(CommandFailed, match=r"sends elsewhere, to 'http://localhost:\d+/elsewhere'"):
        HttpFront(url, Access()).rendered([{"role": "user", "content": "x"}], "")
    assert keys == []


@pytest.mark.parametrize("url", ["x", "http://127.0.0.1:99999", "http://["])
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(CommandFailed, match="is not the URL of an HTTP API"):
        HttpFront(url, Access())
