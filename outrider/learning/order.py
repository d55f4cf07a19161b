"""The order of a lesson, as it goes from the service to the child process."""

import json
from dataclasses import asdict, dataclass

OUT_OF_MEMORY = 3
"""Exit status of a child that got no more memory."""


@dataclass(frozen=True, slots=True)
class LessonOrder:
    """What a child has to do, and within which bounds.

    Attributes:
        source: folder or id of the model to begin with.
        others: folders or ids of versions to score beside it, by version.
        version: version of `source`.
        out: folder of the new weights; the child writes `out`.partial and renames it.
        candidate: version of the new weights.
        steps: steps of training; 0: only score.
        rate: highest learning rate.
        memory_mb: most memory that the child may write to, in MiB.
        cores: most cores to compute on.
        seconds: most processor time, in seconds.
        target: folder or id of the target that a head belongs to; empty: the model is whole.
    """

    source: str
    others: dict[int, str]
    version: int
    out: str
    candidate: int
    steps: int
    rate: float
    memory_mb: int
    cores: int
    seconds: int
    target: str = ""

    def to_json(self) -> str:
        """The order as the child reads it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "LessonOrder":
        """The order that `to_json` wrote."""
        read = json.loads(text)
        return cls(**read | {"others": {int(version): name for version, name in read["others"].items()}})
