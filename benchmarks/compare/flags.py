"""The flags of `bench compare`: which endpoints there are, and what is sent to each of them."""

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.compare.event_stream import Endpoint

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


def add_endpoints(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that name endpoints and their keys."""
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


def add_requests(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of what is sent to each endpoint, and how often."""
    parser.add_argument(
        "--concurrency",
        type=_numbers,
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


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]
