"""What depends on how soon something happens: on a busy machine the best of three tries counts."""

TRIES = 3
"""How often a test whose failure is `NotInTime` is run at most; see tests/conftest.py."""


class NotInTime(AssertionError):
    """Something happened too late, or not before something else."""


def in_time(happened: object, what: object = "it came too late") -> None:
    """Asserts what a machine that is busy with others may break; nothing else may hang on the machine."""
    __tracebackhide__ = True
    if not happened:
        raise NotInTime(what)
