"""Where a model lies: a folder, or a Hugging Face id and a revision; and errors for an incomplete model.

A folder is never looked up on the network. Knows nothing of the contents of weights and tokenizers.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import is_offline_mode
from transformers import PreTrainedConfig

from outrider.tokens import split_revision
from speculative.errors import InvalidRequest

_INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_POINTER = b"version https://git-lfs"
_NAMED = 3
"""Largest number of files that an error message names."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The folder or id of a model, as its user names it."""

    text: str
    """Text that the user wrote."""
    name: str
    """Path of the folder, or the id without its revision."""
    revision: str | None = None
    """Branch, tag or commit; None: the default branch."""

    @classmethod
    def of(cls, text: str) -> "ModelSource":
        """Parses a folder or id. Raises InvalidRequest for a missing folder and for text that is no name."""
        if text and Path(text).expanduser().exists():
            return cls(text, str(Path(text).expanduser()))
        name, revision = split_revision(text)
        if not name or Path(name).is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
            raise InvalidRequest(f"there is no model folder {text!r}")
        if revision == "":
            raise InvalidRequest(f"{text!r} names no revision behind the @: a branch, a tag or a commit")
        return cls(text, name, revision)

    @property
    def is_folder(self) -> bool:
        """Whether the model is a folder on this machine."""
        return Path(self.name).is_dir()

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for transformers' `from_pretrained`, besides the name."""
        local = {"local_files_only": self.is_folder}
        return local if self.revision is None else local | {"revision": self.revision}

    def read_config(self) -> dict[str, Any]:
        """Reads the model's configuration as stored. Raises InvalidRequest, which says what is missing."""
        folder = Path(self.name)
        if folder.exists() and not (folder / "config.json").is_file():
            raise InvalidRequest(f"{self.text!r} is not a model folder: it has no config.json")
        try:
            raw, _ = PreTrainedConfig.get_config_dict(self.name, **self.arguments)
        except (OSError, ValueError) as error:
            raise InvalidRequest(self.missing(error)) from error
        return raw

    def missing(self, error: BaseException) -> str:
        """Error message that says why the model was not found."""
        said = first_line(error)
        if self.is_folder or not is_offline_mode():
            return f"model {self.text!r} was not found: {said}"
        command = f"hf download {self.name}" + (f" --revision {self.revision}" if self.revision else "")
        return (
            f"model {self.text!r} was not found in the cache of this machine, or not all of it, and "
            f"HF_HUB_OFFLINE is set: unset it, or run `{command}` where there is a network ({said})"
        )

    def check_whole(self) -> None:
        """Raises InvalidRequest for a folder whose download, or clone, stopped half way."""
        if not self.is_folder:
            return
        folder = Path(self.name)
        index = next((folder / name for name in _INDICES if (folder / name).is_file()), None)
        if index is None:
            files = [name for name in _WEIGHTS if (folder / name).is_file()]
            if not files:
                raise InvalidRequest(
                    f"{self.text!r} has no weights: none of {', '.join((*_WEIGHTS, *_INDICES))}"
                )
        else:
            files = sorted(set(_weight_map(index).values()))
            gone = [name for name in files if not (folder / name).is_file()]
            if gone:
                raise InvalidRequest(
                    f"{self.text!r} is not whole: {len(gone)} of {len(files)} files of weights are missing "
                    f"({_some(gone)}); download it again"
                )
        pointers = [name for name in files if _is_pointer(folder / name)]
        if pointers:
            raise InvalidRequest(
                f"{self.text!r} holds pointers in place of weights ({_some(pointers)}): "
                "run `git lfs pull` there, or download it again"
            )


def _weight_map(index: Path) -> dict[str, str]:
    try:
        found = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(file) for name, file in found.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidRequest(f"{index} cannot be read: {first_line(error)}; download it again") from error


def _is_pointer(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_POINTER)) == _POINTER


def _some(names: list[str]) -> str:
    return ", ".join(names[:_NAMED]) + (", …" if len(names) > _NAMED else "")


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, or the name of its class."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
