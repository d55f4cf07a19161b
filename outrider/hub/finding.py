"""Finds a model by folder or id, in a folder, on the hub, or in the cache where the hub is out of reach.

What is found lies on this machine with its small files; `fetch_weights` brings the rest.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import constants

from outrider.hub.cached import cached, whole_model
from outrider.hub.download import DownloadView, download
from outrider.hub.listing import HubModel, look_up
from speculative.errors import InvalidRequest, Unavailable


class _Unseen:
    """Shows no progress, for downloads that take only a moment."""

    def began(self, model: str, size: int) -> None:
        """Shows no beginning."""

    def arrived(self, count: int) -> None:
        """Shows no bytes."""

    def stalled(self, seconds: float) -> None:
        """Shows no stall."""

    def ended(self) -> None:
        """Shows no end."""


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model whose configuration and tokenizer lie on this machine."""

    text: str
    """Folder or id, as the user writes it."""
    folder: Path
    """Folder of the model's files."""
    size: int
    """Bytes of the weights; 0 where unknown."""
    on_hub: HubModel | None = None
    """Listing of the hub; None for a folder, and for a model that is taken from the cache."""
    note: str = ""
    """Note for the user about where the model was found; may be empty."""

    @property
    def missing_bytes(self) -> int:
        """Bytes of weights that are not downloaded yet."""
        hub = self.on_hub
        return 0 if hub is None else sum(file.size for file in hub.missing(hub.weights))


def read_config(folder: Path) -> dict[str, Any]:
    """A folder's `config.json`; empty where there is none that can be read."""
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def find_model(text: str) -> FoundModel:
    """Finds a model, and downloads its configuration and tokenizer. Raises OutriderError.

    If HF_HUB_OFFLINE is set or the hub is out of reach, a model must be complete in the cache.
    """
    folder = Path(text).expanduser()
    if folder.is_dir():
        whole = whole_model(text, folder)
        return FoundModel(text, folder, whole.size if whole else 0)
    if folder.is_file():
        raise InvalidRequest(f"{text!r} is a file: give the folder with the model's config.json, or an id")
    if constants.HF_HUB_OFFLINE:
        return _from_cache(text, None)
    try:
        model = look_up(text)
    except Unavailable as error:
        return _from_cache(text, error)
    if not any(file.path == "config.json" for file in model.files):
        raise InvalidRequest(f"{text!r} cannot be served: its repository has no config.json")
    if not model.weights:
        raise InvalidRequest(
            f"{text!r} has no weights that can be served (model*.safetensors or pytorch_model*.bin): a "
            "repository of GGUF files or of an adapter; give the model from which these were made"
        )
    return FoundModel(text, download(model, model.small_files, _Unseen()), model.size, model)


def fetch_weights(model: FoundModel, view: DownloadView) -> None:
    """Downloads the weights that the cache lacks. Raises OutriderError."""
    if model.on_hub is not None:
        download(model.on_hub, model.on_hub.weights, view)


def _from_cache(text: str, why: Unavailable | None) -> FoundModel:
    found = cached(text)
    if found is None:
        if why is not None:
            raise why
        name, _, revision = text.partition("@")
        command = f"hf download {name}" + (f" --revision {revision}" if revision else "")
        raise InvalidRequest(
            f"model {text!r} is not in the cache of this machine, or not all of it, and HF_HUB_OFFLINE is "
            f"set: unset it, or run `{command}` where there is a network"
        )
    reason = "HF_HUB_OFFLINE is set" if why is None else f"the hub is out of reach ({why})"
    return FoundModel(text, found.folder, found.size, note=f"{text} comes from the cache: {reason}")
