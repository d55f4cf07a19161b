"""What a hub has of a model: one commit with its files, and which of the files a service loads.

The library keeps a finished file and drops an unfinished one; `outrider.hub.transfer` resumes it.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from huggingface_hub import HfApi, constants, hf_hub_url

from outrider.hub.failures import BadListing, failure_of
from outrider.tokens import split_revision

LOOK_UP_S = 10.0
"""Timeout in seconds of a request for a model's listing."""
DEFAULT_REVISION = "main"
SMALL = ("*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt", "additional_chat_templates/*.jinja")
"""Names of the files that a service reads beside the weights."""
WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")
"""Name patterns of files with weights, the preferred format first."""
INDEX = ".index.json"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a model on a hub."""

    path: str
    size: int
    """Bytes."""
    digest: str
    """SHA-256 of a large file, git's SHA-1 of a small one; also its name in the cache."""
    url: str


@dataclass(frozen=True, slots=True)
class HubModel:
    """One commit of a model on a hub, and its place in the cache."""

    text: str
    """The id as the user writes it: ORG/NAME or ORG/NAME@REVISION."""
    name: str
    revision: str
    commit: str
    files: tuple[HubFile, ...]
    storage: Path
    """The model's folder in the cache, laid out as `huggingface_hub` documents it."""

    @property
    def snapshot(self) -> Path:
        """The folder with the files of this commit."""
        return self.storage / "snapshots" / self.commit

    def missing(self, files: Iterable[HubFile]) -> list[HubFile]:
        """The files of the listing that the cache lacks."""
        return [file for file in files if not (self.snapshot / file.path).exists()]

    @property
    def small_files(self) -> list[HubFile]:
        """Files that a service loads apart from the weights: configuration and tokenizer."""
        return [file for file in self.files if any(_matches(file.path, pattern) for pattern in SMALL)]

    @property
    def weights(self) -> list[HubFile]:
        """The files with weights in one format; empty for a repository without weights."""
        for pattern in WEIGHTS:
            if found := [file for file in self.files if _matches(file.path, pattern)]:
                return found
        return []

    @property
    def size(self) -> int:
        """Bytes of the weights."""
        return sum(file.size for file in self.weights)


def storage_of(name: str) -> Path:
    """The folder of a model in the cache of this machine."""
    return Path(constants.HF_HUB_CACHE).expanduser() / f"models--{name.replace('/', '--')}"


def look_up(text: str) -> HubModel:
    """Asks the hub for a model, ORG/NAME or ORG/NAME@REVISION.

    Blocks for at most `LOOK_UP_S` seconds. Raises OutriderError, which says what to do.
    """
    name, revision = split_revision(text)
    try:
        found = HfApi(constants.ENDPOINT).model_info(
            name, revision=revision, files_metadata=True, timeout=LOOK_UP_S
        )
        commit = found.sha or ""
        if not _COMMIT.fullmatch(commit):
            raise BadListing(f"its commit is {commit[:60]!r}")
        files = tuple(
            HubFile(
                one.rfilename,
                one.lfs.size if one.lfs else one.size or 0,
                one.lfs.sha256 if one.lfs else one.blob_id or "",
                hf_hub_url(name, one.rfilename, revision=commit),
            )
            for one in found.siblings or ()
        )
        for file in files:
            if not _DIGEST.fullmatch(file.digest):
                raise BadListing(f"the digest of {file.path[:60]!r} is {file.digest[:60]!r}")
    except Exception as error:  # the transport's classes change with the library's version
        raise failure_of(error, text) from error
    return HubModel(text, name, revision or DEFAULT_REVISION, commit, files, storage_of(name))


def _matches(path: str, pattern: str) -> bool:
    return path.count("/") == pattern.count("/") and fnmatchcase(path, pattern)
