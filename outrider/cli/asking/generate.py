"""`outrider generate`: sends one request; prints the answer as it arrives, or as one JSON object."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from outrider.cli.access import NOTHING_TO_SHOW, Access
from outrider.cli.asking.request_flags import Switch
from outrider.cli.failures import CommandFailed, usage
from outrider.client import Choice, Client, Completion, Logprob, Usage
from outrider.client.options import Options
from outrider.wire.names import MAX_REFERENCES
from speculative.acceptance.criterion import Promise

_OF_DRAFTS = ("sources", "corpora", "nodes", "policy", "criterion")
"""Options that contradict drafting that is off. References and `edit` do not: the APIs accept them, too."""


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


def parse_criterion(text: str | None) -> dict[str, dict[str, float]] | None:
    """A criterion from text such as bild or typical:epsilon=0.2,delta=0.3. Raises CommandFailed otherwise."""
    if text is None:
        return None
    name, colon, parameters = text.partition(":")
    try:
        given = [part.split("=") for part in parameters.split(",")] if colon else []
        numbers = {parameter.strip(): float(value) for parameter, value in given}
    except ValueError as error:
        raise usage(
            f"--criterion {text!r} is not NAME or NAME:PARAMETER=NUMBER,..., such as "
            "typical:epsilon=0.2,delta=0.3"
        ) from error
    if len(numbers) < len(given):
        raise usage(f"--criterion {text!r} gives a parameter twice; give each once")
    return {name: numbers}


def options_of(flags: Mapping[str, Any]) -> Options:
    """The request's options, from the values of the command's flags. Raises CommandFailed."""
    options = {name: flags[name] for name in Options.__annotations__ if name in flags}
    of = flags["logprobs_of"]
    options |= {
        "ids": None if flags["ids"] is None else parse_ids(flags["ids"], "--ids"),
        "stop": flags["stop"] or (),
        "stop_ids": parse_ids(flags["stop_ids"], "--stop-ids"),
        "json_schema": read_schema(flags["json_schema"]),
        "choice": flags["choice"] or None,
        "lark": read_grammar(flags["lark"]),
        "logprobs_of": None if of is None else of.value,
        "speculation": flags["speculation"] is Switch.ON,
        "sources": parse_names(flags["sources"], "--sources"),
        "learn": flags["learn"] is Switch.ON,
        "corpora": parse_names(flags["corpora"], "--corpora"),
        "references": read_references(flags["references"] or ()),
        "criterion": parse_criterion(flags["criterion"]),
    }
    return cast(Options, options)


def check_together(prompt: str | None, options: Options, *, as_json: bool) -> None:
    """Raises CommandFailed where options contradict each other or need one another."""
    if (prompt is None) == (options["ids"] is None):
        raise usage("give either --prompt or --ids")
    if options["logprobs"] and not as_json:
        raise usage("--logprobs needs --json")
    off = "--speculation off" if not options["speculation"] else "--nodes 0" if options["nodes"] == 0 else ""
    for name in _OF_DRAFTS if off else ():
        if options.get(name):
            raise usage(f"{off} and --{name} contradict each other: leave one of the two out")


def read_schema(value: str) -> str | None:
    """The JSON schema of a flag's value, which is the schema or its file's path; None for an empty value.

    Raises CommandFailed if the file cannot be read.
    """
    if not value or value.lstrip().startswith("{"):
        return value or None
    try:
        return Path(value).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise usage(f"--json-schema {value!r} is neither a schema, {{...}}, nor a file: {error}") from error


def read_grammar(value: str) -> str | None:
    """The Lark grammar of a flag's value, which is the grammar or its file's path; None for an empty value.

    Raises CommandFailed if the file cannot be read.
    """
    if not value or ":" in value:  # every rule has a colon
        return value or None
    try:
        return Path(value).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise usage(f"--lark {value!r} is neither a grammar, `start: ...`, nor a file: {error}") from error


def read_references(paths: Sequence[str]) -> list[str]:
    """The texts of these files. Raises CommandFailed for an empty or unreadable file, and for too many."""
    if len(paths) > MAX_REFERENCES:
        raise usage(f"--references is given {len(paths)} times; at most {MAX_REFERENCES} files are possible")
    texts = []
    for path in paths:
        try:
            texts.append(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise usage(f"--references {path!r} cannot be read as text: {error}") from error
        if not texts[-1]:
            raise usage(f"--references {path!r} is empty: an answer cannot copy from it; leave it out")
    return texts


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
        "promise": usage.promise.value,
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
    promise = "" if usage.promise is Promise.SAME_IDS else f", promise {usage.promise}"
    print(
        f"{usage.completion_tokens} tokens in {usage.rounds} rounds "
        f"(acceptance length {usage.acceptance_length:.2f}), {completion.finish_reason}, "
        f"seed {completion.seed}{promise}",
        file=sys.stderr,
    )
