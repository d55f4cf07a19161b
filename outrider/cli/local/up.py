"""`outrider up`: runs the stack until a signal stops it."""

import json
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from types import FrameType

from outrider.cli.failures import INTERRUPTED
from outrider.cli.local.stack import Stack
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
    stack = Stack(options)
    try:
        with stoppable(), closing(stack):
            stack.start()
            for _ in stack.wait_ready():
                pass
            _announce(stack, as_json=as_json)
            while True:
                for event in stack.check():
                    print(f"outrider up: {event}", file=sys.stderr, flush=True)
                time.sleep(LOOK_EVERY_S)
    except Stopped as stopped:
        return stopped.status


def _announce(stack: Stack, *, as_json: bool) -> None:
    processes = [
        {"role": child.role, "pid": child.pid, "address": child.address, "metrics": child.metrics}
        for child in stack.children
    ]
    if as_json:
        print(json.dumps({"address": stack.address, "http": stack.http, "processes": processes}), flush=True)
        return
    for process in processes:
        print("{role:<13}{address:<22} process {pid}, http://{metrics}/metrics".format(**process))
    print(f"OpenAI's API: {stack.http}/v1")
    print(f"ready: outrider generate --address {stack.address} --prompt ...", flush=True)
