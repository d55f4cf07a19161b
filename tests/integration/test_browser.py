"""The page in a real browser: streams in colours, compares, shows trees, by mouse and keyboard."""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.live import Up

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


@pytest.fixture(params=["light", "dark"])
def page(browser: Any, up: Up, request: pytest.FixtureRequest) -> Iterator[Any]:
    context = browser.new_context(color_scheme=request.param)
    page = context.new_page()
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda sent: asked.append(sent.url))
    page.goto(up.http)
    page.wait_for_selector("#sources input", timeout=WAIT_MS)
    yield page
    context.close()
    # The browser itself reports each refused request; scripts and policy have nothing to report.
    assert [text for text in said if "status of 400" not in text] == []
    assert {url.startswith((up.http, "data:")) for url in asked} == {True}


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
