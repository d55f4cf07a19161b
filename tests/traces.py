"""Log records with a traceback, which bad input must not leave behind."""

import pytest

_OTHER_LOOP = "PollerCompletionQueue._handle_events"


def traces(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Messages of the records that hold a traceback.

    grpcio's poller serves all event loops of a process. A late event for the closed loop of an earlier test
    is logged whenever it comes, in whatever test, and is left out.
    """
    found = [record.getMessage() for record in caplog.records if record.exc_info]
    return [text for text in found if _OTHER_LOOP not in text]
