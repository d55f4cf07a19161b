"""A verifier that writes to a file when each of its passes began and ended, and what the pass committed.

Run as `python -m benchmarks.step.timed_verifier FILE FLAG...` with a verifier's flags. Times are those of
CLOCK_MONOTONIC, which all processes of a machine share.
"""

import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_FORMAT = struct.Struct("<ddQQQ")


class CommittedPass(NamedTuple):
    """A pass that committed tokens of a session."""

    began_s: float
    ended_s: float
    handle: int
    """The session's number in its verifier."""
    position: int
    """Position of the first token that the pass committed."""
    tokens: int
    """Number of tokens that the pass committed."""


def read_passes(path: Path, offset: int = 0) -> Iterator[CommittedPass]:
    """The passes in a file, in order, from a byte on."""
    data = path.read_bytes()[offset:]
    for fields in _FORMAT.iter_unpack(data[: len(data) // _FORMAT.size * _FORMAT.size]):
        yield CommittedPass(*fields)


def _note_passes(path: Path) -> None:
    from verifier_service.engine.core import EngineCore, TargetPass
    from verifier_service.engine.messages import Update
    from verifier_service.engine.stats import PassTimes
    from verifier_service.engine.step import PassOutcome

    out, finish = path.open("ab", buffering=0), EngineCore.finish

    def noted(
        core: EngineCore, computed: TargetPass, outcome: PassOutcome, times: PassTimes
    ) -> tuple[Update, ...]:
        updates = finish(core, computed, outcome, times)
        spent = times.began_s, times.ended_s
        out.write(b"".join([_FORMAT.pack(*spent, u.handle, u.position, len(u.ids)) for u in updates]))
        return updates

    EngineCore.finish = noted  # type: ignore[method-assign, assignment]


def main() -> None:
    """Takes the file from the arguments, and leaves the others to the verifier."""
    path = Path(sys.argv.pop(1))
    from verifier_service.__main__ import main as serve

    _note_passes(path)
    serve()


if __name__ == "__main__":
    main()
