"""Transfers one file from a hub into an unfinished file beside its place in the cache, and resumes it.

There is no deadline while bytes arrive. A connection that breaks, or stays silent, is opened again at the
next byte. The whole file's digest is compared with the one that the hub announced.
"""

import fcntl
import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from huggingface_hub import constants, get_session, hf_raise_for_status
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils._headers import build_hf_headers

from outrider.hub.failures import AnsweredHtml, HubStalled, WrongContent
from outrider.hub.listing import HubFile

SILENT_READS = 6
"""Consecutive reads that may time out: a minute without a byte at 10 s each (HF_HUB_DOWNLOAD_TIMEOUT)."""
PAUSE_S = 1.0
"""Seconds before a broken connection is opened again."""
PIECE = 1 << 20
"""Bytes per read of a file that an earlier try left."""
Moved = Callable[[int], None]
"""Takes the number of bytes that arrived; below 0 where bytes were thrown away."""


class GivenUp(Exception):
    """The download was cancelled because another transfer failed."""


def transfer(file: HubFile, blob: Path, moved: Moved, stopped: Callable[[], bool]) -> None:
    """Downloads a file to `blob`, where it appears whole. Bytes of an earlier try count as moved at once.

    Raises HubStalled, AnsweredHtml, WrongContent, GivenUp, OSError and the library's errors.
    """
    partial = blob.with_name(f"{blob.name}.incomplete")
    with partial.open("a+b") as kept:
        # If two processes download one model, the second waits here and then finds the file.
        fcntl.flock(kept, fcntl.LOCK_EX)
        if blob.exists():
            partial.unlink(missing_ok=True)
            moved(file.size)
            return
        _Receiving(file, kept, moved, stopped).run()
        kept.flush()
        os.replace(partial, blob)


class _Receiving:
    """The transfer of one file: its position, its digest so far, and the count of silent reads."""

    def __init__(self, file: HubFile, kept: BinaryIO, moved: Moved, stopped: Callable[[], bool]) -> None:
        self._file = file
        self._kept = kept
        self._moved = moved
        self._stopped = stopped
        self._position = 0
        self._silent = 0
        self._digest = _digest_of(file)

    def run(self) -> None:
        """Receives what the partial file lacks, over as many connections as necessary."""
        self._take_kept()
        while self._position < self._file.size:
            try:
                self._receive()
            except (GivenUp, AnsweredHtml, WrongContent):
                raise
            except Exception as error:  # the transport's own classes change with the library's version
                if isinstance(error, OSError) and not _passes(error):
                    raise
                self._silent += 1
                if self._silent >= SILENT_READS:
                    raise HubStalled(self._stall(error)) from error
                self._pause()
        if self._digest.hexdigest() != self._file.digest:
            self._restart()
            raise WrongContent(
                f"{self._file.path} is not the file that the hub announced (digest "
                f"{self._file.digest[:12]}…): the copy was deleted; try again"
            )

    def _take_kept(self) -> None:
        self._kept.seek(0)
        while piece := self._kept.read(PIECE):
            self._count(piece)
        if self._position > self._file.size:
            self._restart()

    def _receive(self) -> None:
        headers = build_hf_headers() | {"Accept-Encoding": "identity"}
        if self._position:
            headers["Range"] = f"bytes={self._position}-"
        timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
        with get_session().stream("GET", self._file.url, headers=headers, timeout=timeout) as response:
            hf_raise_for_status(response)
            if "text/html" in response.headers.get("Content-Type", ""):
                raise AnsweredHtml(self._file.path)
            if self._position and response.status_code != 206:
                self._restart()
            for piece in response.iter_bytes():
                if self._stopped():
                    raise GivenUp
                if self._position + len(piece) > self._file.size:
                    self._restart()
                    raise WrongContent(
                        f"the hub sends more than the {self._file.size:,} bytes that it announced for "
                        f"{self._file.path}: the copy was deleted; try again"
                    )
                self._kept.write(piece)
                self._count(piece)
                self._silent = 0
        if self._position < self._file.size:
            raise EOFError(f"the connection ended after {self._position} of {self._file.size} bytes")

    def _count(self, piece: bytes) -> None:
        self._position += len(piece)
        self._digest.update(piece)
        self._moved(len(piece))

    def _restart(self) -> None:
        self._moved(-self._position)
        self._kept.truncate(0)
        self._position, self._digest = 0, _digest_of(self._file)

    def _pause(self) -> None:
        ends_s = time.monotonic() + PAUSE_S
        while time.monotonic() < ends_s:
            if self._stopped():
                raise GivenUp
            time.sleep(0.05)

    def _stall(self, error: Exception) -> str:
        words = (str(error).strip() or type(error).__name__).splitlines()[0]
        return (
            f"no byte of {self._file.path} arrived in {SILENT_READS} tries ({words}); "
            f"{self._position:,} of {self._file.size:,} bytes are kept: the same command resumes there"
        )


def _passes(error: OSError) -> bool:
    """Whether trying again may help, as with an overloaded hub, unlike a full disk or a refusal."""
    return isinstance(error, HfHubHTTPError) and (
        error.response.status_code == 429 or error.response.status_code >= 500
    )


def _digest_of(file: HubFile) -> "hashlib._Hash":
    """The digest that the hub announces: SHA-256, or git's SHA-1, in which the file's size comes first."""
    if len(file.digest) == 64:
        return hashlib.sha256()
    return hashlib.sha1(f"blob {file.size}\0".encode(), usedforsecurity=False)
