"""Weight of the orchestrator's page, and milliseconds to its first paint in a Chromium of this machine.

Run as `outrider bench page --json`. docs/figures/page.md says what each field means. The verifier behind the
orchestrator has no model. Each load has a browser context of its own, so nothing is cached.
"""

import argparse
import shutil
import time
import urllib.request
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.http.front_clients import MeasuredOrchestrator
from benchmarks.shared.envelope import MODELS, command_line, module_command, print_result, settings_of
from benchmarks.shared.services import HelperProcess

PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
WAIT_MS = 60_000
PAINTS = (
    "() => Object.fromEntries(performance.getEntriesByType('paint').map(one => [one.name, one.startTime]))"
)
SHOWN = "#sources input"
"""The switches of the sources, which the page has once it has heard of the fleet."""


def loads(url: str, program: str, repeats: int) -> dict[str, Any]:
    """Milliseconds and requests of loads of the page: medians, and the most."""
    from playwright.sync_api import sync_playwright

    found: list[dict[str, float]] = []
    requests: list[int] = []
    with sync_playwright() as playwright:
        browser = launched(playwright.chromium, program)
        for number in range(repeats + 1):
            with browser.new_context() as context:
                page, asked = context.new_page(), list[str]()
                page.on("request", lambda sent, asked=asked: asked.append(sent.url))
                began = time.perf_counter()
                page.goto(url)
                page.wait_for_selector(SHOWN, timeout=WAIT_MS)
                ready = (time.perf_counter() - began) * 1000
                if number:  # the first load of a browser pays for its start
                    found.append({**page.evaluate(PAINTS), "ready": ready})
                    requests.append(len(asked))
        version = browser.version
        browser.close()
    milliseconds = {name.replace("-", "_"): round(median(one[name] for one in found), 1) for name in found[0]}
    return {"chromium": version, "requests": max(requests), "milliseconds_to": milliseconds}


def launched(chromium: Any, program: str) -> Any:
    """The browser of a program, by playwright's BrowserType. Exits where the program is no Chromium."""
    from playwright.sync_api import Error

    try:
        return chromium.launch(executable_path=shutil.which(program), args=["--no-sandbox"])
    except Error as error:
        why = error.message.strip().splitlines()[0]
        raise SystemExit(f"--chromium {program}: it did not start as a Chromium: {why}") from error


def fault_in(settings: argparse.Namespace) -> str:
    """What is wrong with the flags; empty where nothing is."""
    if settings.repeats < 1:
        return f"--repeats {settings.repeats}: give 1 or more loads"
    if not (Path(settings.target) / "tokenizer.json").is_file():
        return f"--target {settings.target}: there is no tokenizer.json; name a folder that has one"
    if settings.chromium and shutil.which(settings.chromium) is None:
        return f"--chromium {settings.chromium}: there is no program at this path; '' weighs the page alone"
    return ""


def measure(settings: argparse.Namespace) -> dict[str, Any]:
    """All fields of the result except the envelope's; those of a browser are null where there is none."""
    tokenizer = str(Path(settings.target).resolve() / "tokenizer.json")
    command = module_command("http.fake_verifier", tokenizer, "0.01", "1")
    with HelperProcess(command) as verifier, MeasuredOrchestrator(verifier.address, 8) as orchestrator:
        with urllib.request.urlopen(orchestrator.http, timeout=30) as answer:
            weight = len(answer.read())
        seen: dict[str, Any] = {"chromium": None, "requests": None, "milliseconds_to": None}
        if settings.chromium and find_spec("playwright") is not None:
            seen = loads(orchestrator.http, settings.chromium, settings.repeats)
    return {"bytes": weight, **seen}


def main() -> None:
    """Measures and prints the result as the last line of stdout."""
    parser = command_line("page", __doc__)
    parser.add_argument("--target", default=str(MODELS / "target"), help="folder with a tokenizer.json")
    parser.add_argument("--repeats", type=int, default=9, help="loads of the page, 1 or more (default 9)")
    parser.add_argument(
        "--chromium",
        default=next(filter(None, map(shutil.which, PROGRAMS)), ""),
        help="program of the browser (default: the Chromium on PATH; empty: weigh the page alone)",
    )
    settings = parser.parse_args()
    if wrong := fault_in(settings):
        parser.error(wrong)
    started = time.perf_counter()
    print_result("page", settings_of(settings), started, measure(settings))


if __name__ == "__main__":
    main()
