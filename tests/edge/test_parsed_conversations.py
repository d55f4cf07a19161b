"""The endpoint leaves a conversation to the cloud whose answer the cloud makes more of than text."""

import json
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from outrider.edge.edge_drafter import EdgeDrafter
from outrider.edge.endpoint.cloud import Cloud
from outrider.edge.endpoint.server import EdgeEndpoint
from tests.edge.toy import TextToy

NOWHERE = "127.0.0.1:9"
FACTS = {"id": "toy", "max_model_len": 64, "sampling_defaults": {}}
CHAT = "/v1/chat/completions"


@contextmanager
def cloud_of(facts: dict[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """A cloud with one model: its URL, and the paths that were asked for."""
    asked: list[str] = []
    answers = {"/v1/models": {"data": [facts]}, "/tokenize": {"tokens": [3, 4]}, CHAT: {"the cloud's": "own"}}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            data = json.dumps(answers[self.path]).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", asked
        finally:
            server.shutdown()
            serving.join()


@pytest.mark.parametrize(
    ("said", "drafts"), [({"parses_chat": False}, True), ({"parses_chat": True}, False), ({}, False)]
)
def test_a_device_drafts_for_conversations_only_where_the_cloud_says_that_answers_are_text(
    said: dict[str, bool], drafts: bool
) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    with (
        cloud_of(FACTS | said) as (url, asked),
        EdgeDrafter(NOWHERE, TextToy(), patience_s=0, wait_for_ready=False) as drafter,
        EdgeEndpoint(drafter, Cloud(url)) as endpoint,
        closing(HTTPConnection(endpoint.url.removeprefix("http://"), timeout=30)) as connection,
    ):
        connection.request("POST", CHAT, json.dumps(body))
        answer = json.loads(connection.getresponse().read())
    assert answer == {"the cloud's": "own"}  # also where the device was to draft: its cloud is nowhere
    assert asked == ["/v1/models", *["/tokenize"] * drafts, CHAT]
