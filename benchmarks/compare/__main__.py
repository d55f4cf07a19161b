"""Drives OpenAI-compatible endpoints with the same prompts, side by side: rates, first tokens and gaps.

Run as `outrider bench compare --endpoint NAME=URL ... --json`. docs/figures.md says what each field means.
"""

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.compare.event_stream import Endpoint, EndpointFailed, find_model
from benchmarks.compare.level import drive, level_figures
from benchmarks.shared.envelope import command_line, print_result, settings_of
from benchmarks.shared.figures import alternating_orders
from benchmarks.shared.heldout import held_out_records
from benchmarks.shared.questions import read_questions
from benchmarks.shared.resumable import ResumeFile

PATHS = {False: "/completions", True: "/chat/completions"}
"""Path of a request, by whether it is a conversation."""
PROMPTS = 24
"""Held-out prompts that are sent without --questions."""


def named_endpoint(text: str) -> Endpoint:
    """An endpoint from NAME=URL, or NAME=URL#MODEL for one of several models."""
    name, _, rest = text.partition("=")
    url, _, model = rest.partition("#")
    parts = urlsplit(url)
    if not name or parts.scheme not in ("http", "https") or not parts.hostname:
        raise argparse.ArgumentTypeError(f"{text}: an endpoint is NAME=URL, such as ours=http://HOST:8000/v1")
    return Endpoint(name, url.rstrip("/"), model)


def named_key(text: str) -> tuple[str, str]:
    """An endpoint's name and the environment variable with its key, from NAME=VARIABLE."""
    name, _, variable = text.partition("=")
    if not name or not variable:
        raise argparse.ArgumentTypeError(f"{text}: a key is NAME=VARIABLE, such as ours=OUR_API_KEY")
    return name, variable


def keys_in(variables: Mapping[str, str]) -> dict[str, str]:
    """The keys of endpoints, from the environment variables that hold them, by the endpoints' names.

    Raises SystemExit for a variable that is not set or is empty.
    """
    for name, variable in variables.items():
        if not os.environ.get(variable):
            raise SystemExit(
                f"--key {name}={variable}: the environment variable {variable} is not set or is empty; "
                "put the key into it"
            )
    return {name: os.environ[variable] for name, variable in variables.items()}


class Comparison:
    """All endpoints, what was measured of them, and which failed.

    Args:
        settings: the benchmark's flags.
        kept: where measurements are kept.
    """

    def __init__(self, settings: argparse.Namespace, kept: ResumeFile) -> None:
        self._settings, self._kept = settings, kept
        self._prompts = self._read_prompts()
        self.failed: dict[str, dict[str, Any]] = {}
        """By endpoint: at which concurrency it failed, and why."""
        self._endpoints: list[Endpoint] = []

    async def measure(self) -> None:
        """Runs all levels; endpoints take turns, and one that fails is left out from then on."""
        for endpoint in self._settings.endpoint:
            await self._greet(endpoint)
        for repeat in range(self._settings.repeats):
            orders = alternating_orders([endpoint.name for endpoint in self._endpoints])
            if repeat % 2:
                next(orders)
            for concurrency, order in zip(self._settings.concurrency, orders, strict=False):
                for name in order:
                    await self._level(name, concurrency, repeat)
            print(f"repeat {repeat + 1} of {self._settings.repeats}", file=sys.stderr)

    def fields(self) -> dict[str, Any]:
        """The result's fields; an endpoint that failed has no figures."""
        names = [endpoint.name for endpoint in self._endpoints if endpoint.name not in self.failed]
        if not names:
            raise SystemExit("no endpoint could be measured; why each failed stands above")
        first = self._records(names[0], self._settings.concurrency[0])[0]["texts"]
        figures = {
            name: {
                str(concurrency): level_figures(self._records(name, concurrency), first)
                for concurrency in self._settings.concurrency
            }
            for name in names
        }
        return {"compared_with": names[0], "figures": figures, "failed": self.failed}

    def _records(self, name: str, concurrency: int) -> list[Any]:
        return [self._kept[name, concurrency, repeat] for repeat in range(self._settings.repeats)]

    async def _greet(self, endpoint: Endpoint) -> None:
        """Finds the endpoint's model and key, and answers one request untimed."""
        key = self._settings.keys.get(endpoint.name, "")
        found = Endpoint(endpoint.name, endpoint.url, endpoint.model, key)
        if self._is_measured(endpoint.name):
            self._endpoints.append(found)
            return
        try:
            model = endpoint.model or await find_model(found, self._settings.timeout_s)
            found = Endpoint(endpoint.name, endpoint.url, model, key)
            await self._drive(found, 1, 1)
        except EndpointFailed as failure:
            self._fail(endpoint.name, 0, failure)
        else:
            self._endpoints.append(found)

    async def _level(self, name: str, concurrency: int, repeat: int) -> None:
        key = (name, concurrency, repeat)
        if name in self.failed or key in self._kept:
            return
        endpoint = next(endpoint for endpoint in self._endpoints if endpoint.name == name)
        try:
            self._kept.add(key, await self._drive(endpoint, concurrency, self._requests(concurrency)))
        except EndpointFailed as failure:
            self._fail(name, concurrency, failure)

    async def _drive(self, endpoint: Endpoint, concurrency: int, count: int) -> dict[str, Any]:
        bodies = [self._body(endpoint, number) for number in range(count)]
        path = PATHS[self._settings.chat]
        return await drive(endpoint, path, bodies, concurrency, self._settings.timeout_s)

    def _requests(self, concurrency: int) -> int:
        return max(self._settings.requests, concurrency)

    def _is_measured(self, name: str) -> bool:
        return all(
            (name, concurrency, repeat) in self._kept
            for concurrency in self._settings.concurrency
            for repeat in range(self._settings.repeats)
        )

    def _body(self, endpoint: Endpoint, number: int) -> dict[str, Any]:
        prompt = self._prompts[number % len(self._prompts)]
        body: dict[str, Any] = {
            "model": endpoint.model,
            "max_tokens": self._settings.tokens,
            "temperature": self._settings.temperature,
            "seed": number,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._settings.chat:
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        return body | ({"ignore_eos": True} if self._settings.ignore_eos else {})

    def _read_prompts(self) -> list[str]:
        if self._settings.questions is not None:
            return [question.turns[0] for question in read_questions(self._settings.questions)]
        return [record["prompt"] for record in held_out_records(PROMPTS)]

    def _fail(self, name: str, concurrency: int, failure: EndpointFailed) -> None:
        when = f"at concurrency {concurrency}" if concurrency else "before the first request"
        print(f"{name} failed {when}: {failure}", file=sys.stderr)
        self.failed[name] = {"concurrency": concurrency, "why": str(failure)}


def parse() -> argparse.Namespace:
    """Parses the flags."""

    def numbers(text: str) -> list[int]:
        return [int(number) for number in text.split(",")]

    parser = command_line("compare", __doc__, is_curve=True)
    parser.add_argument(
        "--endpoint",
        type=named_endpoint,
        action="append",
        required=True,
        metavar="NAME=URL[#MODEL]",
        help="an endpoint's name and base URL with /v1; repeatable. Default model: the first that it lists",
    )
    parser.add_argument(
        "--key",
        type=named_key,
        action="append",
        default=[],
        metavar="NAME=VARIABLE",
        help="environment variable with an endpoint's bearer token; repeatable. Default: no token is sent",
    )
    parser.add_argument(
        "--concurrency",
        type=numbers,
        default="1,2,4,8,16,32,64",
        metavar="N,N",
        help="requests at a time, a level for each number; default: %(default)s",
    )
    parser.add_argument(
        "--questions",
        type=Path,
        metavar="FILE",
        help=f"send the first turns of questions of Spec-Bench's format; default: {PROMPTS} held-out prompts",
    )
    parser.add_argument(
        "--chat", action="store_true", help="send conversations of one turn; default: prompts"
    )
    parser.add_argument(
        "--requests", type=int, default=16, help="fewest requests of a level; default: %(default)s"
    )
    parser.add_argument(
        "--tokens", type=int, default=96, help="most tokens of an answer; default: %(default)s"
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy; default: %(default)g")
    parser.add_argument(
        "--ignore-eos",
        action="store_true",
        help="send ignore_eos, which vLLM, SGLang and llama.cpp know too; default: an answer may end early",
    )
    parser.add_argument("--repeats", type=int, default=1, help="repeats of every level; default: %(default)s")
    parser.add_argument(
        "--timeout-s", type=float, default=300.0, help="seconds for one answer; default: %(default)g"
    )
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="FILE",
        help="keep levels here and go on from them; default: measure all levels and keep none",
    )
    settings = parser.parse_args()
    names = [endpoint.name for endpoint in settings.endpoint]
    if len(set(names)) < len(names):
        parser.error(f"two endpoints have one name: {', '.join(names)}")
    if min(settings.concurrency) < 1 or settings.repeats < 1 or settings.requests < 1:
        parser.error("--concurrency, --requests and --repeats must be 1 or more")
    variables = dict(settings.key)
    if unknown := variables.keys() - set(names):
        parser.error(f"--key names no endpoint: {', '.join(sorted(unknown))}")
    settings.keys = keys_in(variables)
    return settings


def main() -> None:
    """Measures all endpoints and prints the result."""
    settings = parse()
    started = time.perf_counter()
    given = settings_of(settings, "resume", "key", "keys", "endpoint")
    given |= {
        "endpoints": {endpoint.name: endpoint.url for endpoint in settings.endpoint},
        "questions": None if settings.questions is None else str(settings.questions),
    }
    comparison = Comparison(settings, ResumeFile(settings.resume, given))
    asyncio.run(comparison.measure())
    print_result("compare", given, started, comparison.fields(), settings.plot)


if __name__ == "__main__":
    main()
