"""Models that devices can download to draft for a target, as a file of the operator's lists them.

The file is a JSON object: by the target's name, a list of drafters, each with `format`, `url`, `bytes`,
`sha256` and, so that devices need not download the model to compare vocabularies, `tokenizer_digest`.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from orchestrator.fleet.target_model import TargetModel
from outrider.v1 import generation_pb2
from outrider.wire.reloading import EVERY_S, Reloaded
from speculative.errors import InvalidRequest

SETTING = "edge_drafters_file"
DraftersOf = Callable[[TargetModel], tuple[generation_pb2.DeviceDrafter, ...]]
"""The drafters that devices can download for a target."""
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    format: Annotated[str, Field(pattern=r"^[a-z0-9_.-]{1,32}$")]
    url: Annotated[str, Field(min_length=1, max_length=2048)]
    bytes: Annotated[int, Field(ge=1, lt=2**63)]
    sha256: Sha256
    tokenizer_digest: Sha256 | None = None


_FILE = TypeAdapter(dict[str, list[_Entry]])


class ListedDrafters:
    """The drafters of a file, by the target's name."""

    def __init__(self, listed: Mapping[str, tuple[generation_pb2.DeviceDrafter, ...]]) -> None:
        self._listed = dict(listed)

    def of(self, target: TargetModel) -> tuple[generation_pb2.DeviceDrafter, ...]:
        """The drafters for a target, without drafters of another vocabulary."""
        fitting = ("", target.tokenizer_digest)
        return tuple(it for it in self._listed.get(target.name, ()) if it.tokenizer_digest in fitting)


def read_drafters(contents: Mapping[str, bytes]) -> ListedDrafters:
    """The drafters that the file lists. Raises InvalidRequest, with the place of what is not valid."""
    try:
        entries = _FILE.validate_json(contents[SETTING])
    except ValidationError as error:
        fault = error.errors(include_input=False)[0]
        place = ".".join(map(str, fault["loc"]))
        raise InvalidRequest(f"{SETTING}: {f'{place}: ' if place else ''}{fault['msg']}") from None
    return ListedDrafters(
        {
            model: tuple(generation_pb2.DeviceDrafter(**entry.model_dump()) for entry in listed)
            for model, listed in entries.items()
        }
    )


def watched_drafters(path: Path, *, every_s: float = EVERY_S) -> Reloaded[ListedDrafters]:
    """The drafters of the file, which is read again when it changes. Raises InvalidRequest."""
    return Reloaded({SETTING: path}, read_drafters, every_s=every_s)
