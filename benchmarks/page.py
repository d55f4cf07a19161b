"""Weight of the orchestrator's page, and milliseconds to its first paint in a Chromium of this machine.

Run as `outrider bench page --json`. docs/figures.md says what each field means. The verifier behind the
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
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
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
    parser.add_argument("--repeats", type=int, default=9, help="loads of the page (default 9)")
    parser.add_argument(
        "--chromium",
        default=next(filter(None, map(shutil.which, PROGRAMS)), ""),
        help="program of the browser (default: the Chromium on PATH; empty: weigh the page alone)",
    )
    settings = parser.parse_args()
    started = time.perf_counter()
    print_result("page", settings_of(settings), started, measure(settings))


if __name__ == "__main__":
    main()
