"""A function whose calls take until a test lets them go on."""

import threading
from collections.abc import Callable
from typing import Any

WAIT_S = 60.0


class Held:
    """A function whose calls wait until `go_on` is set.

    Attributes:
        begun: set by the first call.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self._function = function

    def __call__(self, *given: Any) -> Any:
        self.begun.set()
        assert self.go_on.wait(WAIT_S)
        return self._function(*given)
