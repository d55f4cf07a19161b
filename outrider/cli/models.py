"""`outrider models`: checks whether a drafter fits a target, and recommends settings for the pair.

Modules that do a command's work are imported when it is called. Progress goes to standard error.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli.failures import FAILED, CommandFailed, Json, usage

if TYPE_CHECKING:
    from outrider.pair.checking import Report, Side

app = typer.Typer(help="Check whether two models fit, and what speedup they bring.", rich_markup_mode=None)


@app.callback()
def models() -> None:
    """Check whether two models fit, and what speedup they bring."""


@app.command("check")
def check_models(
    target: Annotated[
        str, typer.Argument(help="Target: a Hugging Face folder, or ORG/NAME, or ORG/NAME@REVISION.")
    ],
    drafter: Annotated[str, typer.Argument(help="Drafter: a folder or an id, in the same form.")],
    text: Annotated[
        Path | None,
        typer.Option(help="Text to continue, or .jsonl with prompts. Default: built-in prompts."),
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, max=1000, help="Continue at most this many prompts.")] = 8,
    tokens: Annotated[int, typer.Option(min=2, max=4096, help="Tokens to generate for each prompt.")] = 48,
    dtype: Annotated[
        str, typer.Option(help="Number format: float32, bfloat16, float16 or float64.")
    ] = "float32",
    device: Annotated[str, typer.Option(help="Torch device.")] = "cpu",
    threads: Annotated[int | None, typer.Option(min=1, help="Compute threads. Default: by cores.")] = None,
    json_: Json = False,
) -> None:
    """Check whether two models can be served together, and recommend settings measured on this machine.

    Exits with 1 where they cannot.

    \b
    Examples:
      outrider models check models/target models/drafter
      outrider models check Qwen/Qwen3-8B Qwen/Qwen3-0.6B --dtype bfloat16 --device cuda --text notes.txt
    """
    if text is not None and not text.expanduser().is_file():
        raise usage(f"there is no text {str(text)!r}")
    try:
        from outrider.pair.checking import CheckOptions, check
    except ModuleNotFoundError as error:
        raise CommandFailed(
            f"{error.name} is not installed: pip install 'outrider[verifier,drafter]'"
        ) from error
    from outrider.runtime.threads import most_threads

    how = CheckOptions(
        dtype=dtype,
        device=device,
        threads=threads or most_threads(),
        text=text,
        prompts=prompts,
        tokens=tokens,
    )
    report = check(target, drafter, how, lambda what: print(what, file=sys.stderr, flush=True))
    print(json.dumps(report.as_object()) if json_ else "\n".join(_lines(report)))
    raise typer.Exit(0 if report.fits else FAILED)


def _lines(report: "Report") -> Iterator[str]:
    for name, side in (("target", report.target), ("drafter", report.drafter)):
        yield f"{name:<11} {_of_side(side)}"
    yield f"tokenizers  {'fit' if report.tokenizers.ok else f'do not fit: {report.tokenizers.difference}'}"
    if not report.fits:
        yield "these two cannot be served together"
        return
    assert report.costs is not None
    target, drafter = report.costs
    ratio = target.step_ms / drafter.step_ms
    yield f"cost        {target.step_ms:.2f} ms a token, drafter {drafter.step_ms:.2f} ms: 1 to {ratio:.1f}"
    yield f"agreement   {report.agreement:.0%} of the target's greedy tokens are the drafter's likeliest"
    for one in report.measured:
        yield (
            f"at {one.temperature:<8g} {one.nodes:>2} nodes: {one.acceptance_length:.2f} tokens a round, "
            f"{one.expected_speedup:.2f} times plain decoding"
        )
    verdict = "use the drafter" if report.advice.drafter else "do not use the drafter"
    yield f"advice      {verdict}: {report.advice.why}"
    for role, settings in report.settings().items():
        yield f"\n[{role}]"
        yield from (f"{name} = {json.dumps(value)}" for name, value in settings.items())


def _of_side(side: "Side") -> str:
    if side.refusal:
        return f"{side.source}: refused: {side.refusal}"
    if not side.max_length:
        return f"{side.source}: {side.type}, not loaded"
    return (
        f"{side.source}: {side.type}, {side.vocabulary_size:,} ids, up to {side.max_length:,} positions "
        f"of {side.kv_bytes_per_id / 1024:,.1f} KiB"
    )
