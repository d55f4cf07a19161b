"""`outrider edge` ends as asked, however soon."""

import io
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.cli.app import main
from tests.edge.fake_llama_server import FakeLlamaServer
from tests.edge.test_llama_server import write_vocabulary


class Hasty(io.StringIO):
    """A standard output whose reader answers the first line with SIGTERM."""

    def flush(self) -> None:
        if self.getvalue().endswith("\n") and not self.lines_answered:
            self.lines_answered = 1
            os.kill(os.getpid(), signal.SIGTERM)

    lines_answered = 0


@pytest.fixture(autouse=True)
def _own_handlers() -> Iterator[None]:
    """Has a SIGTERM that the command does not take fail the test; restores the handlers."""

    def missed(*_: object) -> None:
        raise AssertionError("the command had no handler yet")

    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, missed) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def test_a_signal_that_follows_the_announcement_at_once_ends_it_with_0(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "stdout", Hasty())
    vocabulary = write_vocabulary(tmp_path / "model.gguf", ["a", "b"])
    with FakeLlamaServer(lambda *_: [], str(vocabulary)) as model, pytest.raises(SystemExit) as end:
        main(["edge", "--server", "http://127.0.0.1:9", "--draft-with", model.url, "--bind", "127.0.0.1:0"])
    assert end.value.code == 0
