"""`outrider up`: downloads the models, then runs all services until a signal stops them."""

import json
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from types import FrameType

from outrider.cli.failures import INTERRUPTED
from outrider.cli.local.announcement import announcement
from outrider.cli.local.ports import check_ports
from outrider.cli.local.progress_view import DownloadProgress, LoadProgress, standard_error
from outrider.cli.local.stack import Stack, check_installed
from outrider.cli.local.up_settings import StackOptions

LOOK_EVERY_S = 0.1
"""Seconds between two checks of the services."""


class Stopped(BaseException):
    """A signal to stop arrived; `status` is the exit status."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


@contextmanager
def stoppable(terminated: int = 0) -> Iterator[None]:
    """Makes SIGTERM (status `terminated`) and SIGINT raise Stopped inside, once; ignores further signals."""

    def stop(number: int, frame: FrameType | None) -> None:
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_IGN)
        raise Stopped(terminated if number == signal.SIGTERM else INTERRUPTED)

    before = [(number, signal.signal(number, stop)) for number in (signal.SIGTERM, signal.SIGINT)]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def run_up(options: StackOptions, *, as_json: bool) -> int:
    """Runs the stack until a signal to stop; returns the exit status. Raises CommandFailed, OutriderError."""
    try:
        with stoppable():
            check_installed(retrieval=options.retrieval)
            check_ports(options)
            from outrider.cli.local.models import ready_models  # imports libraries that a client lacks

            models = ready_models(options, DownloadProgress(standard_error()), _say)
            with closing(Stack(models.options)) as stack:
                _start(stack)
                _announce(stack, models.drafter, as_json=as_json)
                while True:
                    for event in stack.check():
                        _say(event)
                    time.sleep(LOOK_EVERY_S)
    except Stopped as stopped:
        return stopped.status


def _start(stack: Stack) -> None:
    for note in stack.notes:
        _say(note)
    stack.start()
    with LoadProgress(standard_error(), compiles=stack.compiles) as progress:
        for _ in stack.wait_ready(progress.show):
            pass


def _announce(stack: Stack, drafter: str, *, as_json: bool) -> None:
    if as_json:
        processes = [
            {"role": child.role, "pid": child.pid, "address": child.address, "metrics": child.metrics}
            for child in stack.children
        ]
        print(json.dumps({"address": stack.address, "http": stack.http, "processes": processes}), flush=True)
    else:
        print("\n".join(announcement(stack, drafter)), flush=True)


def _say(text: str) -> None:
    print(f"outrider up: {text}", file=sys.stderr, flush=True)
