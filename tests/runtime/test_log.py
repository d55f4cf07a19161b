"""One line per event, plain or JSON."""

import io
import json
import logging
from collections.abc import Iterator

import pytest

from outrider.runtime.log import Format, configure


@pytest.fixture(autouse=True)
def _root_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def logged(format_: Format, **kwargs: object) -> str:
    stream = io.StringIO()
    configure("verifier", "info", format_, stream)
    logging.getLogger("some.module").warning("stream %s lost", 3, **kwargs)  # type: ignore[arg-type]
    logging.getLogger("some.module").debug("not logged")
    return stream.getvalue()


def test_a_plain_line_has_role_level_logger_message_and_fields() -> None:
    line = logged("plain", extra={"fields": {"peer": "a:1"}})
    assert line.endswith(" verifier WARNING some.module: stream 3 lost peer=a:1\n")


def test_a_json_line_is_one_object() -> None:
    line = logged("json", extra={"fields": {"peer": "a:1", "level": "ignored"}})
    event = json.loads(line)
    assert line.count("\n") == 1
    assert event.pop("time").endswith("+00:00")
    assert event == {
        "role": "verifier",
        "level": "warning",
        "logger": "some.module",
        "message": "stream 3 lost",
        "peer": "a:1",
    }


@pytest.mark.parametrize("format_", ["plain", "json"])
def test_an_exception_is_logged_with_its_trace(format_: Format) -> None:
    assert "ValueError: odd" in logged(format_, exc_info=ValueError("odd"))


def test_a_field_that_json_cannot_express_is_logged_as_text() -> None:
    assert json.loads(logged("json", extra={"fields": {"what": {1, 2}}}))["what"] == "{1, 2}"


FORGED = "odd\n12:00:00.000 verifier ERROR x: forged\x1b[31m\u202e"


def test_a_peer_s_text_cannot_look_like_another_event() -> None:
    stream = io.StringIO()
    configure("verifier", "info", "plain", stream)
    log = logging.getLogger("some.module")
    log.warning("it says %s", FORGED, extra={"fields": {"name": FORGED}})
    log.warning("failed", exc_info=ValueError(FORGED))
    lines = stream.getvalue().splitlines()
    assert [line for line in lines if not line.startswith("  ")] == [lines[0], lines[1]]
    assert lines[0].count(r"odd\n12:00:00.000 verifier ERROR x: forged\x1b[31m\u202e") == 2
    assert "\x1b" not in stream.getvalue()
    assert "é" in logged("plain", extra={"fields": {"name": "é"}})


@pytest.mark.parametrize("propagates", [True, False])
def test_a_library_with_a_handler_of_its_own_is_logged_once_and_in_our_form(
    capsys: pytest.CaptureFixture[str], propagates: bool
) -> None:
    library = logging.getLogger("some_library")
    library.addHandler(logging.StreamHandler())
    library.propagate = propagates
    configure("verifier", "info", "plain")
    library.warning("retrying")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(" verifier WARNING some_library: retrying")
