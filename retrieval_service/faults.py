"""What a disk that takes no more, or answers no more, means to whoever called."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from speculative.errors import OutriderError, Overloaded

RETRY_AFTER_S = 60.0
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class DiskFailed(OutriderError):
    """Something could not be written, read or removed."""

    code = "FAILED_PRECONDITION"


class TooSlow(OutriderError):
    """What is to be written was not written in time; it may be later."""

    code = "UNAVAILABLE"


@contextmanager
def told(what: str) -> Iterator[None]:
    """What the system says of files inside the block, as a caller is told it; `what` begins the sentence."""
    try:
        yield
    except TimeoutError as error:
        raise TooSlow(f"{what}: the disk did not take it in time; ask again") from error
    except OSError as error:
        if error.errno in FULL:
            raise Overloaded(f"{what}: no room on the disk ({error.strerror})", RETRY_AFTER_S) from error
        raise DiskFailed(f"{what}: {error.strerror or error}") from error
