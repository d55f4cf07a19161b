"""`outrider generate`: sends one request; prints the answer as it arrives, or as one JSON object."""

import json
import sys
from pathlib import Path

from outrider.cli.access import NOTHING_TO_SHOW, Access
from outrider.cli.failures import CommandFailed, usage
from outrider.client import Choice, Client, Completion, Logprob, Usage
from outrider.client.options import Options


def parse_ids(text: str, flag: str) -> list[int]:
    """Token ids from text such as 1,2,3; empty text gives an empty list. Raises CommandFailed otherwise."""
    try:
        return [int(part) for part in text.split(",")] if text.strip() else []
    except ValueError as error:
        raise usage(f"{flag} {text!r} is not a list of whole numbers such as 1,2,3") from error


def parse_names(text: str | None, flag: str) -> list[str]:
    """Names from text such as a,b; None gives an empty list. Raises CommandFailed for an empty name."""
    names = [] if text is None else [name.strip() for name in text.split(",")]
    if not all(names):
        raise usage(f"{flag} {text!r} has an empty name; give names such as a,b, or leave {flag} out for all")
    return names


def check_drafting(options: Options) -> None:
    """Raises CommandFailed where speculation is off but options of speculation are given."""
    for name in () if options["speculation"] else ("sources", "corpora", "nodes"):
        if options.get(name):
            raise usage(f"--speculation off and --{name} contradict each other: leave one of the two out")


def read_schema(value: str) -> str | None:
    """The JSON schema of a flag's value, which is the schema or its file's path; None for an empty value.

    Raises CommandFailed where the file cannot be read.
    """
    if not value or value.lstrip().startswith("{"):
        return value or None
    try:
        return Path(value).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise usage(f"--json-schema {value!r} is neither a schema, {{...}}, nor a file: {error}") from error


def run_generate(
    address: str,
    prompt: str | None,
    options: Options,
    access: Access = NOTHING_TO_SHOW,
    *,
    as_json: bool,
) -> None:
    """Sends the request and prints the answer. Raises OutriderError, CommandFailed."""
    if sys.stdout is None:
        raise CommandFailed("standard output is closed: the answer would be lost")
    with access.client(address) as client:
        if as_json:
            print(json.dumps(as_object(client.generate(prompt, **options))))
        else:
            _stream(client, prompt, options)


def as_object(completion: Completion) -> dict[str, object]:
    """The object that --json prints: the first answer's fields, and several answers under `choices`."""
    found: dict[str, object] = {
        "ids": completion.ids,
        "text": completion.text,
        "finish_reason": completion.finish_reason.value,
        "seed": completion.seed,
        "session": completion.session,
        "usage": _usage_object(completion.usage),
    }
    if completion.logprobs:
        found["logprobs"] = [_logprob_object(logprob) for logprob in completion.logprobs]
    if len(completion.choices) > 1:
        found["choices"] = [_choice_object(choice) for choice in completion.choices]
    return found


def _choice_object(choice: Choice) -> dict[str, object]:
    found: dict[str, object] = {
        "ids": choice.ids,
        "text": choice.text,
        "finish_reason": choice.finish_reason.value,
        "seed": choice.seed,
        "usage": _usage_object(choice.usage),
    }
    if choice.logprobs:
        found["logprobs"] = [_logprob_object(logprob) for logprob in choice.logprobs]
    return found


def _logprob_object(logprob: Logprob) -> dict[str, object]:
    return {"id": logprob.id, "logprob": logprob.logprob, "top": logprob.top}


def _usage_object(usage: Usage) -> dict[str, object]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "rounds": usage.rounds,
        "acceptance_length": usage.acceptance_length,
        "accepted_by_source": dict(usage.accepted_by_source),
    }


def _stream(client: Client, prompt: str | None, options: Options) -> None:
    """Prints a single answer as it arrives; several answers at the end, each below its number."""
    stream = client.stream(prompt, **options)
    several = (options.get("n") or 1) > 1
    for chunk in stream:
        if not several:
            print(chunk.text, end="", flush=True)
    completion = stream.completion()
    for number, choice in enumerate(completion.choices):
        if several:
            print(f"--- {number}: {choice.finish_reason}, seed {choice.seed}\n{choice.text}", end="")
        if not choice.text and choice.ids:
            print(",".join(map(str, choice.ids)), end="")
        print(flush=True)
    usage = completion.usage
    print(
        f"{usage.completion_tokens} tokens in {usage.rounds} rounds "
        f"(acceptance length {usage.acceptance_length:.2f}), {completion.finish_reason}, "
        f"seed {completion.seed}",
        file=sys.stderr,
    )
