"""Runs commands inside the tests' process; a command that becomes another program needs its own process."""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from outrider.cli.app import main


class Ended(NamedTuple):
    """Exit status and output of a command."""

    status: int
    out: str
    err: str

    @property
    def said(self) -> dict[str, Any]:
        """The single JSON object that the command printed."""
        assert self.out.count("\n") == 1, self
        said: dict[str, Any] = json.loads(self.out)
        return said


Run = Callable[..., Ended]


def ended(capsys: pytest.CaptureFixture[str], *arguments: object) -> Ended:
    """Runs the command with these arguments; returns its exit status and output."""
    with pytest.raises(SystemExit) as end:
        main([*map(str, arguments)])
    assert isinstance(end.value.code, int)
    return Ended(end.value.code, *capsys.readouterr())
