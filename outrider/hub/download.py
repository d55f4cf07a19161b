"""Downloads several files of a model at once into this machine's cache, and reports progress.

The caller's thread only watches; threads of this module transfer files, and end when the caller gives up.
"""

import os
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Protocol

from huggingface_hub import constants

from outrider.hub.failures import failure_of
from outrider.hub.listing import HubFile, HubModel
from outrider.hub.transfer import GivenUp, transfer
from speculative.errors import Unavailable

STREAMS = 4
"""Files that are downloaded at once."""
STALL_S = 10.0
"""Seconds without a byte after which the user is told of the stall."""
WATCH_S = 0.1
"""Seconds between two looks at the transfers."""


class DownloadView(Protocol):
    """Shows a download to a person."""

    def began(self, model: str, size: int) -> None:
        """The download of `size` bytes begins."""

    def arrived(self, count: int) -> None:
        """`count` bytes of the download are there, those of an earlier try included."""

    def stalled(self, seconds: float) -> None:
        """No byte arrived for `seconds`; called again while that lasts."""

    def ended(self) -> None:
        """The download has ended, whole or not."""


def download(model: HubModel, files: Sequence[HubFile], view: DownloadView) -> Path:
    """Downloads those of the files that the cache lacks; returns the folder of the model's files.

    Raises OutriderError, which says what to do. The next call resumes after the bytes that have arrived.
    """
    missing = model.missing(files)
    if missing:
        blobs = model.storage / "blobs"
        try:
            blobs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise failure_of(error, model.text) from error
        _check_room(model, missing)
        _Download(missing, blobs).run(model.text, view)
    try:
        _link(model, missing)
    except OSError as error:
        raise failure_of(error, model.text) from error
    return model.snapshot


class _Download:
    """The transfers of one model: files still to download, bytes that arrived, and the first failure."""

    def __init__(self, files: Sequence[HubFile], blobs: Path) -> None:
        self._left: SimpleQueue[HubFile] = SimpleQueue()
        # The largest first, so that all transfers end at about the same time.
        for file in sorted(files, key=lambda one: -one.size):
            self._left.put(file)
        self._size = sum(file.size for file in files)
        self._blobs = blobs
        self._arrived = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._failure: BaseException | None = None

    def run(self, text: str, view: DownloadView) -> None:
        """Transfers all files. Raises OutriderError."""
        streams = [threading.Thread(target=self._stream, daemon=True) for _ in range(STREAMS)]
        view.began(text, self._size)
        try:
            for stream in streams:
                stream.start()
            self._watch(streams, view)
        finally:
            self._stop.set()
            view.ended()
        if self._failure is not None:
            raise failure_of(self._failure, text) from self._failure

    def _watch(self, streams: Sequence[threading.Thread], view: DownloadView) -> None:
        shown, since_s, told_s = -1, time.monotonic(), 0.0
        while any(stream.is_alive() for stream in streams) and self._failure is None:
            time.sleep(WATCH_S)
            now_s = time.monotonic()
            if self._arrived != shown:
                shown, since_s, told_s = self._arrived, now_s, 0.0
                view.arrived(shown)
            elif now_s - since_s >= told_s + STALL_S:
                told_s = now_s - since_s
                view.stalled(told_s)
        view.arrived(self._arrived)

    def _stream(self) -> None:
        while not self._stop.is_set():
            try:
                file = self._left.get_nowait()
            except Empty:
                return
            try:
                transfer(file, self._blobs / file.digest, self._moved, self._stop.is_set)
            except GivenUp:
                return
            except BaseException as error:
                self._failure = self._failure or error
                return

    def _moved(self, count: int) -> None:
        with self._lock:
            self._arrived += count


def _check_room(model: HubModel, files: Sequence[HubFile]) -> None:
    """Raises Unavailable if the disk has no room for the files."""
    kept = sum(map(_size, (model.storage / "blobs").glob("*.incomplete")))
    needed, free = sum(file.size for file in files) - kept, shutil.disk_usage(model.storage).free
    if needed > free:
        raise Unavailable(
            f"model {model.text!r} needs {needed / 1e9:,.1f} GB more, and the disk of "
            f"{constants.HF_HUB_CACHE} has {free / 1e9:,.1f} GB free: make room, or set HF_HOME to a folder "
            "on another disk"
        )


def _size(partial: Path) -> int:
    """Bytes of a file; 0 if another process has just renamed it."""
    try:
        return partial.stat().st_size
    except FileNotFoundError:
        return 0


def _link(model: HubModel, files: Sequence[HubFile]) -> None:
    """Puts the files into the model's snapshot, and names the snapshot by its revision."""
    for file in files:
        place = model.snapshot / file.path
        place.parent.mkdir(parents=True, exist_ok=True)
        if not place.exists():
            place.unlink(missing_ok=True)
            place.symlink_to(os.path.relpath(model.storage / "blobs" / file.digest, place.parent))
    if model.revision != model.commit:
        ref = model.storage / "refs" / model.revision
        ref.parent.mkdir(parents=True, exist_ok=True)
        ref.write_text(model.commit, encoding="utf-8")
