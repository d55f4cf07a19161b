"""A request's id and trace are passed on, and its log lines carry the id."""

import asyncio
import io
import json
import logging
from collections.abc import Iterator

import pytest

from outrider.runtime.log import configure
from outrider.wire.origin import Origin, arrived, bound, bound_fields, current, is_sampled, origin_of

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(autouse=True)
def _root_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_caller_s_id_and_trace_are_passed_on_as_metadata() -> None:
    origin = origin_of([("user-agent", "x"), ("x-request-id", "job-7"), ("traceparent", TRACE.encode())])
    assert origin == Origin("job-7", TRACE)
    assert origin.metadata == (("x-request-id", "job-7"), ("traceparent", TRACE))
    assert Origin().metadata == ()


@pytest.mark.parametrize("name", ["", "two\nlines", "\x1b[31m", "x" * 129, "a b", "é"])
def test_an_id_that_could_forge_a_line_is_replaced_by_one_of_our_own(name: str) -> None:
    drawn = origin_of([("x-request-id", name)]).request
    assert drawn != name
    assert len(drawn) == 16
    assert drawn != origin_of([("x-request-id", name)]).request


@pytest.mark.parametrize(
    "trace",
    [
        "",
        "junk",
        TRACE + "-more",
        TRACE.replace("00-", "ff-"),
        "00-" + "0" * 32 + "-b7ad6b7169203331-01",
        "00-0af7651916cd43dd8448eb211c80319c-" + "0" * 16 + "-01",
        TRACE.upper(),
    ],
)
def test_a_malformed_trace_counts_as_absent(trace: str) -> None:
    assert origin_of([("traceparent", trace)]).traceparent == ""
    assert not is_sampled(trace)


def test_whether_a_trace_is_sampled_is_its_last_flag() -> None:
    assert is_sampled(TRACE)
    assert not is_sampled(TRACE[:-2] + "00")
    assert is_sampled(TRACE[:-2] + "03")


def test_fields_are_bound_inside_and_gone_outside() -> None:
    with bound(Origin("r1"), tenant="", session="s1"):
        assert current() == Origin("r1")
        with bound(Origin("r1"), choice="2"):
            assert bound_fields() == {"request": "r1", "session": "s1", "choice": "2"}
        assert bound_fields() == {"request": "r1", "session": "s1"}
    assert current() == Origin()
    assert bound_fields() == {}


async def test_requests_that_run_side_by_side_keep_their_fields_apart() -> None:
    stream = io.StringIO()
    configure("orchestrator", "info", "json", stream)

    async def request(name: str) -> None:
        arrived(Origin(name))
        for _ in range(3):
            with bound(current(), session=f"session of {name}"):
                await asyncio.sleep(0.001)
                logging.getLogger("x").info("step", extra={"fields": {"peer": "a:1"}})

    await asyncio.gather(*(asyncio.create_task(request(name)) for name in ("a", "b")))
    events = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert len(events) == 6
    for event in events:
        assert event["session"] == f"session of {event['request']}"
        assert event["peer"] == "a:1"


def test_an_event_s_own_field_wins_over_a_bound_one() -> None:
    stream = io.StringIO()
    configure("orchestrator", "info", "plain", stream)
    with bound(Origin("r1"), session="outer"):
        logging.getLogger("x").info("said", extra={"fields": {"session": "inner"}})
    assert stream.getvalue().endswith("INFO x: said request=r1 session=inner\n")
