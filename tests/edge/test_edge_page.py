"""The page that says how the device is used."""

from dataclasses import asdict

from outrider.edge.controller import Controller, Preference
from outrider.edge.drafted_request import DraftedRequest
from outrider.edge.endpoint.page import page_of
from outrider.edge.latency_model import Mode
from outrider.edge.measurements import Measurements


def test_before_the_first_request_the_page_says_so() -> None:
    assert b"has not drafted" in page_of({"device": None, "explain": None})


def test_the_page_has_the_mode_its_reason_and_the_numbers() -> None:
    seen = Measurements()
    seen.round_trip(12.345)
    request = DraftedRequest(Controller(Preference.LATENCY, seen, fixed=Mode.HINTING), bytes_up=4321)
    said = {"device": asdict(request.report()), "explain": request.controller.explain()}
    page = page_of(said).decode()
    for text in ("<b>hinting</b>", "hinting was asked for", "<td>rtt_ms<td>12.35", "<td>bytes_up<td>4321"):
        assert text in page


def test_what_a_drafting_program_says_cannot_become_markup() -> None:
    request = DraftedRequest(
        Controller(Preference.LATENCY, Measurements()), trouble="<script>alert(1)</script>"
    )
    said = {"device": asdict(request.report()), "explain": request.controller.explain()}
    assert b"<script" not in page_of(said)
    assert b"&lt;script&gt;" in page_of(said)
