"""A Hugging Face hub on this machine, which serves folders over HTTP: for tests and benchmarks of downloads.

It has the two routes by which `outrider.hub` looks a model up and downloads it, answers HEAD and Range, and
can misbehave: break connections, fall silent, answer with a web page, send other bytes, refuse tokens.
"""

import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self

LARGE = 4_096
"""Bytes from which on a file has a SHA-256, as files in large file storage have."""
PIECE = 8_192
_INFO = re.compile(r"/api/models/([^/]+/[^/?]+)(?:/revision/([^/?]+))?(?:\?.*)?")
_FILE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/([^?]+)(?:\?.*)?")


@dataclass
class Misbehaviour:
    """Faults of a hub; none by default."""

    cut_after: dict[str, list[int]] = field(default_factory=dict)
    """Bytes of a file's body, by path, after which each of the next connections breaks."""
    silent_after: dict[str, int] = field(default_factory=dict)
    """Bytes of a file, by path, from which on every connection is silent."""
    other_bytes: set[str] = field(default_factory=set)
    """Paths of files that are sent with other contents."""
    endless: set[str] = field(default_factory=set)
    """Paths of files that are sent many times over."""
    web_page: bool = False
    """Whether every answer is a web page."""
    web_page_for: set[str] = field(default_factory=set)
    """Paths of files in place of which a web page is sent."""
    status: int = 0
    """The status of every answer; 0: no such failure."""


class LocalHub:
    """A hub that serves folders as models until it is closed; a context manager."""

    def __init__(
        self,
        models: Mapping[str, Path],
        *,
        token: str = "",
        gated: frozenset[str] = frozenset(),
    ) -> None:
        """Serves `models`, ORG/NAME to folder, on a free port of this machine.

        Args:
            token: the only token that is accepted; empty: a model needs none, and every token is accepted.
            gated: models whose files nobody gets.
        """
        self.models = {name: _Model(name, folder) for name, folder in models.items()}
        self.token = token
        self.gated = gated
        self.wrong = Misbehaviour()
        self.sent: Counter[str] = Counter()
        """Bytes of bodies that were sent, by path of the file."""
        self.ended = threading.Event()

        class Handler(_Handler):
            """Answers for this hub."""

            hub = self

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """The address for HF_ENDPOINT."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        """Stops serving; connections that are silent end."""
        self.ended.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True)
class _Model:
    """One model as a hub describes it."""

    name: str
    folder: Path

    @cached_property
    def commit(self) -> str:
        """A commit's hash, made of the contents."""
        digests = "".join(f"{path} {self.digest(path)}\n" for path in self.paths)
        return hashlib.sha1(digests.encode(), usedforsecurity=False).hexdigest()

    @cached_property
    def paths(self) -> list[str]:
        """Paths of the files, relative to the folder."""
        return sorted(str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file())

    def digest(self, path: str) -> str:
        """The SHA-256 of a large file, git's SHA-1 of a small one."""
        content = (self.folder / path).read_bytes()
        if len(content) >= LARGE:
            return hashlib.sha256(content).hexdigest()
        return hashlib.sha1(f"blob {len(content)}\0".encode() + content, usedforsecurity=False).hexdigest()

    @cached_property
    def info(self) -> dict[str, Any]:
        """The answer to a question about the model."""
        return {"id": self.name, "sha": self.commit, "siblings": [self._sibling(path) for path in self.paths]}

    def _sibling(self, path: str) -> dict[str, Any]:
        size, digest = (self.folder / path).stat().st_size, self.digest(path)
        found: dict[str, Any] = {"rfilename": path, "size": size, "blobId": digest[:40]}
        if size >= LARGE:
            found["lfs"] = {"size": size, "sha256": digest, "pointerSize": 134}
        return found


class _Handler(BaseHTTPRequestHandler):
    """Answers one connection."""

    protocol_version = "HTTP/1.1"
    hub: LocalHub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing."""

    def _answer(self) -> None:
        hub = self.hub
        if hub.wrong.status:
            self._refuse(hub.wrong.status, "", "out of order")
        elif hub.wrong.web_page:
            self._web_page()
        elif (token := self.headers.get("Authorization")) and hub.token and token != f"Bearer {hub.token}":
            self._refuse(401, "", "Invalid credentials in Authorization header")
        elif found := _INFO.fullmatch(self.path):
            self._describe(*found.groups())
        elif found := _FILE.fullmatch(self.path):
            self._serve(*found.groups())
        else:
            self._refuse(404, "", "no such route")

    def _model(self, name: str, revision: str | None) -> _Model | None:
        """The model that is asked for; None after a refusal."""
        model = self.hub.models.get(name)
        if model is None:
            self._refuse(404, "RepoNotFound", "Repository not found")
        elif revision not in (None, "main", model.commit):
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        elif self.hub.token and not self.headers.get("Authorization"):
            self._refuse(401, "RepoNotFound", "Invalid username or password.")
        else:
            return model
        return None

    def _describe(self, name: str, revision: str | None) -> None:
        if model := self._model(name, revision):
            self._send(200, json.dumps(model.info).encode(), {"Content-Type": "application/json"})

    def _serve(self, name: str, revision: str, path: str) -> None:
        model = self._model(name, revision)
        if model is None:
            return
        if name in self.hub.gated:
            self._refuse(403, "GatedRepo", f"Access to model {name} is restricted")
        elif path not in model.paths:
            self._refuse(404, "EntryNotFound", "Entry not found")
        elif path in self.hub.wrong.web_page_for:
            self._web_page()
        else:
            self._serve_file(model, path)

    def _serve_file(self, model: _Model, path: str) -> None:
        content = (model.folder / path).read_bytes()
        if path in self.hub.wrong.other_bytes:
            content = bytes(len(content))
        if path in self.hub.wrong.endless:
            content *= 50
        size = len(content)
        headers = {"ETag": f'"{model.digest(path)}"', "X-Repo-Commit": model.commit, "Accept-Ranges": "bytes"}
        status, start = 200, 0
        if found := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
            start = int(found[1])
            if start >= size:
                self._refuse(416, "", "range")
                return
            status, content = 206, content[start:]
            headers["Content-Range"] = f"bytes {start}-{size - 1}/{size}"
        self._send(status, content, headers, path, start)

    def _send(
        self, status: int, body: bytes, headers: Mapping[str, str], path: str = "", start: int = 0
    ) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        cuts = self.hub.wrong.cut_after.get(path)
        cut = cuts.pop(0) if cuts else None
        silent_at = self.hub.wrong.silent_after.get(path)
        silent = None if silent_at is None else max(0, silent_at - start)
        end = min(one for one in (len(body), cut, silent) if one is not None)
        for at in range(0, end, PIECE):
            piece = body[at : min(at + PIECE, end)]
            self.wfile.write(piece)
            self.hub.sent[path] += len(piece)
        if silent is not None:
            self.hub.ended.wait()
        if end < len(body):
            self.close_connection = True

    def _refuse(self, status: int, code: str, said: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": said})

    def _web_page(self) -> None:
        self._send(200, b"<html><body>Please log in.</body></html>", {"Content-Type": "text/html"})
