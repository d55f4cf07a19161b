"""`outrider generate`: one request, as text while it comes or as one JSON object."""

import json
import sys

from outrider.cli.failures import usage
from outrider.client import Client, Completion
from outrider.completions import Options


def parse_ids(text: str) -> list[int]:
    """1,2,3; nothing at all is an empty prompt. Raises CommandFailed for what are no numbers."""
    try:
        return [int(part) for part in text.split(",")] if text.strip() else []
    except ValueError as error:
        raise usage(f"--ids {text!r} is not a list of whole numbers such as 1,2,3") from error


def parse_names(text: str) -> list[str]:
    """a,b"""
    return [name.strip() for name in text.split(",") if name.strip()]


def run_generate(address: str, prompt: str | None, options: Options, *, as_json: bool) -> None:
    """Ask and print. Raises OutriderError."""
    with Client(address) as client:
        if as_json:
            print(json.dumps(as_object(client.generate(prompt, **options))))
        else:
            _stream(client, prompt, options)


def as_object(completion: Completion) -> dict[str, object]:
    """What --json prints."""
    usage = completion.usage
    return {
        "ids": completion.ids,
        "text": completion.text,
        "finish_reason": completion.finish_reason.value,
        "seed": completion.seed,
        "session": completion.session,
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "rounds": usage.rounds,
            "acceptance_length": usage.acceptance_length,
            "accepted_by_source": dict(usage.accepted_by_source),
        },
    }


def _stream(client: Client, prompt: str | None, options: Options) -> None:
    stream = client.stream(prompt, **options)
    for chunk in stream:
        print(chunk.text, end="", flush=True)
    completion = stream.completion()
    if not completion.text and completion.ids:
        print(",".join(map(str, completion.ids)), end="")
    print(flush=True)
    usage = completion.usage
    print(
        f"{usage.completion_tokens} tokens in {usage.rounds} rounds "
        f"(acceptance length {usage.acceptance_length:.2f}), {completion.finish_reason}, "
        f"seed {completion.seed}",
        file=sys.stderr,
    )
