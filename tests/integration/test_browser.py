"""The page in a real browser: streams in colours, compares, shows trees, by mouse and keyboard."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from outrider.runtime.children import ServiceProcess
from tests.integration.live import Up
from tests.orchestrator.fronts import write_keys

pytestmark = [pytest.mark.browser, pytest.mark.slow]

PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
WAIT_MS = 100_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    driver = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        pytest.skip(f"there is no Chromium here: none of {', '.join(PROGRAMS)}")
    with driver.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield opened
        opened.close()


@contextmanager
def opened(browser: Any, url: str, refusal: int, colours: str = "light") -> Iterator[Any]:
    """The page, which must not report anything but requests refused with the status `refusal`."""
    context = browser.new_context(color_scheme=colours)
    page = context.new_page()
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda sent: asked.append(sent.url))
    page.goto(url)
    yield page
    context.close()
    # The browser itself reports each refused request; scripts and policy have nothing to report.
    assert [text for text in said if f"status of {refusal}" not in text] == []
    assert {address.startswith((url, "data:")) for address in asked} == {True}


@pytest.fixture(params=["light", "dark"])
def page(browser: Any, up: Up, request: pytest.FixtureRequest) -> Iterator[Any]:
    with opened(browser, up.http, 400, request.param) as page:
        page.wait_for_selector("#sources input", timeout=WAIT_MS)
        yield page


@pytest.fixture
def guarded(up: Up, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """The address of a second orchestrator that needs a key, and the key."""
    (key,) = write_keys(tmp_path / "keys", ["us"])
    verifier = next(one["address"] for one in up.processes if one["role"] == "verifier")
    flags = ["--verifier", verifier, "--bind", "127.0.0.1:0", "--http-bind", "127.0.0.1:0"]
    flags += ["--api-keys-file", str(tmp_path / "keys")]
    process = ServiceProcess.start("orchestrator", "orchestrator", flags, log_path=tmp_path / "log")
    try:
        process.wait_ready(100)
        yield process.http, key
    finally:
        assert process.stop(100) == 0, (tmp_path / "log").read_text()


def idle(page: Any) -> None:
    page.wait_for_selector("#stop:disabled", timeout=WAIT_MS)
    assert page.is_hidden("#error"), page.inner_text("#error")


def test_an_answer_streams_in_and_its_rounds_are_shown_by_the_keyboard_alone(page: Any) -> None:
    page.fill("#prompt", "a b a b a b")
    page.fill("#tokens", "24")
    page.press("#prompt", "Control+Enter")
    idle(page)
    assert "24 tokens" in page.inner_text(".pane .figures")
    assert page.locator(".text span").count() >= 20
    page.focus('.text span[tabindex="0"]')
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert (
        page.evaluate("[...document.activeElement.parentNode.children].indexOf(document.activeElement)") == 3
    )
    page.wait_for_selector("#tree h2", timeout=WAIT_MS)
    assert "Committed" in page.inner_text("#tree")
    assert page.locator(".text .round").count() >= 1
    ink, paper = (
        page.evaluate(f"getComputedStyle(document.body).{name}") for name in ("color", "backgroundColor")
    )
    assert ink != paper


def test_both_ways_are_decoded_in_turn_and_their_ids_are_equal(page: Any) -> None:
    page.fill("#prompt", "a b a b a b")
    page.fill("#tokens", "16")
    for first in ("speculative first", "plain first"):
        page.click("#compare")
        idle(page)
        assert "ids equal: yes" in page.inner_text("#verdict")
        assert first in page.inner_text("#verdict")
    titles = page.locator(".pane h2").all_inner_texts()
    assert titles == ["With speculation", "Plain decoding"]
    texts = page.locator(".pane .text").all_inner_texts()
    assert texts[0] == texts[1] != ""
    page.hover(".pane:first-child .text span")
    page.wait_for_selector("#tree h2", timeout=WAIT_MS)


def test_a_refusal_is_shown_in_the_servers_words(page: Any) -> None:
    page.fill("#tokens", "99999")
    page.click("#run")
    page.wait_for_selector("#error", state="visible", timeout=WAIT_MS)
    assert "max_tokens" in page.inner_text("#error")
    page.wait_for_selector("#stop:disabled", timeout=WAIT_MS)


def test_switches_decide_who_drafts_and_how_much(page: Any) -> None:
    page.fill("#tokens", "4")
    for box in page.locator("#sources input").all()[1:]:
        box.uncheck()
    (kept,) = page.locator("#sources input:checked").all()
    page.focus("#nodes")
    page.keyboard.press("End")
    assert page.inner_text("#nodes-value") == "64"
    with page.expect_request("**/v1/completions") as sent:
        page.click("#run")
    idle(page)
    asked = {"sources": [kept.input_value()], "nodes": 64, "learn": False}
    assert sent.value.post_data_json["speculation"] == asked
    kept.uncheck()
    with page.expect_request("**/v1/completions") as sent:
        page.click("#run")
    idle(page)
    assert sent.value.post_data_json["speculation"] == {"enabled": False, "learn": False}
    assert page.locator(".pane h2").all_inner_texts() == ["Plain decoding"]


def test_both_ways_find_the_prompt_read_and_teach_nobody(page: Any) -> None:
    page.fill("#tokens", "5")
    sent: list[dict[str, Any]] = []
    page.on("request", lambda one: sent.append(one.post_data_json) if one.method == "POST" else None)
    page.click("#compare")
    idle(page)
    first, *compared = sent
    assert (first["max_tokens"], first["speculation"]["enabled"]) == (1, False)
    assert [one["max_tokens"] for one in compared] == [5, 5]
    assert sorted(one["speculation"].get("enabled", True) for one in compared) == [False, True]
    assert {one["speculation"]["learn"] for one in sent} == {False}
    without = [{key: one[key] for key in one if key != "speculation"} for one in compared]
    assert without[0] == without[1]


DELTAS = [
    ({"role": "assistant", "reasoning_content": "Hm, "}, [("Hm, ", "target")]),
    ({"reasoning_content": "so"}, [("so", "lookup")]),
    ({"content": "Yes"}, [("</think>", "target"), ("Yes", "target")]),
]


def recorded() -> str:
    """The stream of a chat whose answer reasons, as the server writes streams."""
    lines = []
    for delta, tokens in DELTAS:
        sources = [{"text": text, "source": source} for text, source in tokens]
        choice = {"index": 0, "delta": delta, "token_ids": [1] * len(tokens), "token_sources": sources}
        lines.append(f"data: {json.dumps({'id': 'chatcmpl-1', 'choices': [choice]})}\n\n")
    return "".join([*lines, "data: [DONE]\n\n"])


def test_a_chat_shows_reasoning_and_sends_back_the_answer_alone(page: Any) -> None:
    asked: list[list[dict[str, str]]] = []

    def answer(route: Any) -> None:
        asked.append(route.request.post_data_json["messages"])
        route.fulfill(body=recorded(), content_type="text/event-stream")

    page.route("**/v1/chat/completions", answer)
    page.route("**/explain/*", lambda route: route.fulfill(json={"incarnations": []}))
    page.check("input[value=chat]")
    for said in ("Is it?", "Really?"):
        page.fill("#prompt", said)
        page.press("#prompt", "Control+Enter")
        idle(page)
        assert page.input_value("#prompt") == ""
    assert page.inner_text(".pane .text") == "Hm, soYes"
    assert page.locator(".text .thought").all_inner_texts() == ["Hm, ", "so"]
    question, reply = {"role": "user", "content": "Is it?"}, {"role": "assistant", "content": "Yes"}
    assert asked == [[question], [question, reply, {"role": "user", "content": "Really?"}]]
    page.click("#forget")
    page.fill("#prompt", "New")
    page.press("#prompt", "Control+Enter")
    idle(page)
    assert asked[-1] == [{"role": "user", "content": "New"}]


def test_behind_keys_the_page_asks_for_one_and_takes_the_right_one(
    browser: Any, guarded: tuple[str, str]
) -> None:
    url, key = guarded
    with opened(browser, url, 401) as page:
        page.wait_for_selector("#key", timeout=WAIT_MS)
        assert "key" in page.inner_text("#fleet")
        page.fill("#key", "wrong")
        page.press("#key", "Tab")
        page.wait_for_function("document.querySelector('#fleet').textContent.includes('key')")
        page.click("#run")
        page.wait_for_selector("#error", state="visible", timeout=WAIT_MS)
        assert "key" in page.inner_text("#error")
        page.fill("#key", key)
        page.press("#key", "Tab")
        page.wait_for_selector("#sources input", timeout=WAIT_MS)
        page.fill("#prompt", "a b")
        page.fill("#tokens", "3")
        page.click("#run")
        idle(page)
        assert "3 tokens" in page.inner_text(".pane .figures")
        assert page.evaluate("Object.keys(localStorage).length + document.cookie.length") == 0
