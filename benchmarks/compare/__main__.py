"""Drives OpenAI-compatible endpoints with the same prompts, side by side: rates, first tokens and gaps.

Run as `outrider bench compare --endpoint NAME=URL ... --json`. docs/figures/compare.md says what each field
means.
"""

import argparse
import asyncio
import sys
import time
from typing import Any

from benchmarks.compare.event_stream import Endpoint, EndpointFailed, find_model
from benchmarks.compare.flags import PROMPTS, add_endpoints, add_requests, keys_in
from benchmarks.compare.level import drive, level_figures
from benchmarks.shared.envelope import command_line, print_result, settings_of
from benchmarks.shared.figures import alternating_orders
from benchmarks.shared.heldout import held_out_records
from benchmarks.shared.questions import read_questions
from benchmarks.shared.resumable import ResumeFile

PATHS = {False: "/completions", True: "/chat/completions"}
"""Path of a request, by whether it is a conversation."""


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
        requests: int = self._settings.requests
        return max(requests, concurrency)

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
    """The flags, with the keys of endpoints under `keys`, by the endpoints' names.

    Raises SystemExit for flags that do not go together, and for a key whose variable is not set.
    """
    parser = command_line("compare", __doc__, is_curve=True)
    add_endpoints(parser)
    add_requests(parser)
    settings = parser.parse_args()
    _check(parser, settings)
    settings.keys = keys_in(dict(settings.key))
    return settings


def _check(parser: argparse.ArgumentParser, settings: argparse.Namespace) -> None:
    """Ends the program with the usage where flags do not go together."""
    names = [endpoint.name for endpoint in settings.endpoint]
    if len(set(names)) < len(names):
        parser.error(f"two endpoints have one name: {', '.join(names)}")
    if min(settings.concurrency) < 1 or settings.repeats < 1 or settings.requests < 1:
        parser.error("--concurrency, --requests and --repeats must be 1 or more")
    if unknown := dict(settings.key).keys() - set(names):
        parser.error(f"--key names no endpoint: {', '.join(sorted(unknown))}")


def main() -> None:
    """Measures all endpoints and prints the result; ends with status 1 where an endpoint failed."""
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
    if comparison.failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
