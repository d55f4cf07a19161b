"""Takes the services' logs during a simulation: errors are violations, other records go to the trace."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PACKAGES = ("orchestrator", "verifier_service", "outrider")


class _LogHandler(logging.Handler):
    def __init__(self, violated: Callable[[str], None], note: Callable[[str], None] | None) -> None:
        super().__init__()
        self._violated = violated
        self._note = note

    def emit(self, record: logging.LogRecord) -> None:
        fields = getattr(record, "fields", {})
        text = f"{record.getMessage()} {fields}" if fields else record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            text += f": {record.exc_info[1]!r}"
        if record.levelno >= logging.ERROR:
            self._violated(f"logged: {record.name}: {text}")
        elif self._note is not None:
            self._note(f"{record.name}: {text}")


@contextmanager
def quiet() -> Iterator[None]:
    """Leaves out what is not an error, over many simulations: `logged` then has no level to change."""
    before = [(logging.getLogger(name), logging.getLogger(name).level) for name in PACKAGES]
    for logger, _ in before:
        _set_level(logger, logging.ERROR)
    try:
        yield
    finally:
        for logger, level in before:
            _set_level(logger, level)


@contextmanager
def logged(violated: Callable[[str], None], note: Callable[[str], None] | None) -> Iterator[None]:
    """Sends the services' log records to `violated` and `note` alone inside the block."""
    handler = _LogHandler(violated, note)
    loggers = [logging.getLogger(name) for name in PACKAGES]
    before = [(logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.propagate = False
        _set_level(logger, logging.ERROR if note is None else logging.INFO)
    try:
        yield
    finally:
        for logger, (level, propagates) in zip(loggers, before, strict=True):
            logger.removeHandler(handler)
            _set_level(logger, level)
            logger.propagate = propagates


def _set_level(logger: logging.Logger, level: int) -> None:
    """Sets a level that differs: each change has logging forget which records it lets through."""
    if logger.level != level:
        logger.setLevel(level)
