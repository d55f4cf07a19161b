"""Stands in for llama.cpp's server: /props, /tokenize and /completion, with answers that a test sets."""

import json
import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

Answer = Callable[[Sequence[int], int], Sequence[tuple[int, float]]]
"""From the prompt's ids and a number k to the k likeliest ids with their log-probabilities."""


class FakeLlamaServer:
    """A server whose /completion answers as `answer` says, or with the text `rubbish`, if that is set.

    Attributes:
        hangs_up: whether connections end without a word after an answer, as idle ones do.
    """

    def __init__(self, answer: Answer, model_path: str, context: int = 2048) -> None:
        self.answer = answer
        self.model_path = model_path
        self.context = context
        self.eos_token = ""
        self.hangs_up = False
        self.rubbish: str | None = None
        self.status = 200
        self.asked: list[dict[str, Any]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                settings = {"n_ctx": outer.context}
                self._send(
                    {
                        "model_path": outer.model_path,
                        "default_generation_settings": settings,
                        "eos_token": outer.eos_token,
                    }
                )

            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path == "/tokenize":
                    self._send({"tokens": list(asked["content"].encode())})
                    return
                outer.asked.append(asked)
                likeliest = outer.answer(asked["prompt"], asked["n_probs"])
                listed = [
                    {"id": id_, "token": "?", "bytes": [id_ % 256], "logprob": logprob}
                    for id_, logprob in likeliest
                ]
                best = listed[0]["id"] if listed else 0
                self._send(
                    {"tokens": [best], "completion_probabilities": [{"id": best, "top_logprobs": listed}]}
                )

            def _send(self, answer: dict[str, Any]) -> None:
                text = (json.dumps(answer) if outer.rubbish is None else outer.rubbish).encode()
                self.send_response(outer.status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)
                self.close_connection = self.close_connection or outer.hangs_up

            def log_message(self, *_: object) -> None:
                pass

        self._handler = Handler
        self._server = self._listen(0)
        self.port: int = self._server.server_address[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        """Ends the server and all connections."""
        self._server.shutdown()
        self._server.server_close()

    def start_again(self) -> None:
        """Listens at the same port again."""
        self._server = self._listen(self.port)

    def _listen(self, port: int) -> ThreadingHTTPServer:
        server = ThreadingHTTPServer(("127.0.0.1", port), self._handler)
        server.daemon_threads = True
        server.block_on_close = False
        server.handle_error = lambda *_: None  # type: ignore[method-assign]  # clients hang up
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return server

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
