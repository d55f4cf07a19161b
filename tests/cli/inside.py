"""Commands run inside the tests' process; one that becomes another program needs a process of its own."""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from outrider.cli.app import main


class Ended(NamedTuple):
    """How a command ended, and what it printed."""

    status: int
    out: str
    err: str

    @property
    def said(self) -> dict[str, Any]:
        """The one JSON object that it printed."""
        assert self.out.count("\n") == 1, self
        said: dict[str, Any] = json.loads(self.out)
        return said


Run = Callable[..., Ended]


def ended(capsys: pytest.CaptureFixture[str], *arguments: object) -> Ended:
    """The command of these arguments."""
    with pytest.raises(SystemExit) as end:
        main([*map(str, arguments)])
    assert isinstance(end.value.code, int)
    return Ended(end.value.code, *capsys.readouterr())
