"""Seconds from `outrider up ID` to the first token: with an empty cache, and with the model in the cache.

The model comes from a hub on this machine, so a network costs nothing here. Every start is a process of its
own with ports of its own; the arms take turns. docs/figures/first_token.md says what each field means.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.shared.envelope import MODELS, REPOSITORY, command_line, print_result, settings_of
from benchmarks.shared.local_hub import LocalHub
from outrider.client import Client

NAME = "outrider/target"
"""Id of the model at the hub."""
STOP_S = 15.0
"""Seconds that `up` gets to end."""


def start_and_ask(hub: LocalHub, home: Path) -> dict[str, float]:
    """Starts `up`, asks for one token, stops it; returns seconds since the start, by milestone."""
    free = ["--bind", "127.0.0.1:0", "--http-bind", "127.0.0.1:0", "--drafter", "none", "--threads", "1"]
    command = [sys.executable, "-m", "outrider.cli", "up", NAME, *free, "--passes", "eager"]
    env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"}
    env.pop("HF_HUB_CACHE", None)
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY, env=env) as process:
        try:
            address = _ready_at(process)
            ready = time.perf_counter() - began
            with (
                Client(address) as client,
                client.stream("def fib(n):", max_tokens=1, temperature=0) as stream,
            ):
                next(stream)
            return {"ready": ready, "first_token": time.perf_counter() - began}
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(STOP_S)


def _ready_at(process: subprocess.Popen[str]) -> str:
    """host:port of the orchestrator, from the line that `up` prints last. Raises SystemExit without one."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("ready: "):
            return line.split()[4]
    raise SystemExit("`outrider up` did not get ready: see above")


def measure(settings: argparse.Namespace) -> dict[str, Any]:
    """All fields of the result except the envelope's; seconds are medians over the repeats."""
    arms: dict[str, list[dict[str, float]]] = {"empty_cache": [], "cached": []}
    folder = Path(settings.target)
    with LocalHub({NAME: folder}) as hub:
        for _ in range(settings.repeats):
            with tempfile.TemporaryDirectory() as home:
                for arm in arms.values():
                    arm.append(start_and_ask(hub, Path(home)))
                    print(f"{arm[-1]['first_token']:.1f} s to the first token", file=sys.stderr)
        sent = sum(hub.sent.values()) // settings.repeats
    medians = {
        arm: {part: round(statistics.median(one[part] for one in found), 2) for part in found[0]}
        for arm, found in arms.items()
    }
    return {"downloaded_bytes": sent, "seconds_to": medians}


def main() -> None:
    """Measures and prints the result as the last line of stdout."""
    parser = command_line("first_token", __doc__)
    parser.add_argument(
        "--target", default=str(MODELS / "target"), help="folder of the model that the hub has"
    )
    parser.add_argument("--repeats", type=int, default=3, help="starts of each arm (default 3)")
    settings = parser.parse_args()
    started = time.perf_counter()
    print_result("first_token", settings_of(settings), started, measure(settings))


if __name__ == "__main__":
    main()
