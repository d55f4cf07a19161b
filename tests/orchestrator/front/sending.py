"""Sends bodies to a front as they are, without a client that mends them."""

import contextlib
import http.client
import json
from typing import Any

from tests.orchestrator.front.test_http_completions import HI

TEXT: dict[str, Any] = {"model": "toy", "prompt": "abc", "max_tokens": 4}
CHAT: dict[str, Any] = {"model": "toy", "messages": HI, "max_tokens": 4}


def send(
    url: str, path: str, body: bytes, method: str = "POST", **headers: str
) -> tuple[int, dict[str, Any], dict[str, str]]:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=100)
    with contextlib.closing(connection):
        connection.request(method, path, body, {"content-type": "application/json", **headers})
        response = connection.getresponse()
        return response.status, json.loads(response.read()), dict(response.getheaders())
