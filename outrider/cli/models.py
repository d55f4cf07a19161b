"""`outrider models`: suggests a drafter for a target, checks a pair, and recommends settings for the pair.

Modules that do a command's work are imported when it is called. Progress goes to standard error.
"""

import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.failures import FAILED, CommandFailed, Json, usage

if TYPE_CHECKING:
    from outrider.pair.checking import Report, Side
    from outrider.pair.skipping import Skipped

app = typer.Typer(
    help="Suggest a drafter; check whether two models fit, and what speedup they bring.",
    rich_markup_mode=None,
)


@app.callback()
def models() -> None:
    """Suggest a drafter; check whether two models fit, and what speedup they bring."""


@app.command("suggest")
def suggest(
    target: Annotated[
        str, typer.Argument(help="Target: a Hugging Face folder, or ORG/NAME, or ORG/NAME@REVISION.")
    ],
    json_: Json = False,
) -> None:
    """Suggest a drafter for a target: the one that `outrider up --drafter auto` would take.

    Looks in a table of model families, then at models of this machine. Downloads configurations and
    tokenizers, no weights. Also names the head that `--heads auto` would take, where one is known.

    \b
    Examples:
      outrider models suggest Qwen/Qwen3-8B
      outrider models suggest /weights/my-model --json
    """
    try:
        from outrider.cli.local.up_settings import EMBEDDED
        from outrider.hub.finding import find_model
        from outrider.pair.candidates import suggest_drafter
        from outrider.pair.drafter_choice import listed_siblings
        from outrider.pair.known_heads import known_head
    except ModuleNotFoundError as error:
        raise CommandFailed(f"{error.name} is not installed: pip install 'outrider[serve]'") from error

    choice = suggest_drafter(find_model(target))
    listed = listed_siblings(target)
    head = known_head(target, EMBEDDED)
    if json_:
        found = {"target": target, "drafter": choice.drafter or None, "why": choice.why, "head": head or None}
        passed_over = [{"model": name, "why": why} for name, why in choice.passed_over]
        print(json.dumps(found | {"passed_over": passed_over, "family": [one.name for one in listed]}))
        return
    print(f"drafter  {choice.drafter or 'none'}: {choice.why}")
    for name, why in choice.passed_over:
        print(f"not      {name}: {why}")
    if len(listed) > 1:
        print(f"family   {', '.join(one.name for one in listed)}")
    if head:
        print(f"head     {head}: made for this target; outrider up {shlex.quote(target)} --heads auto")
    if choice.drafter:
        print(f"measure  {shlex.join(['outrider', 'models', 'check', target, choice.drafter])}")


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
        str, typer.Option(help="Number format: auto, float32, bfloat16, float16 or float64.")
    ] = "auto",
    device: Annotated[str, typer.Option(help="Torch device, such as auto, cpu or cuda.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="Compute threads. Default: by cores.")] = None,
    search: Annotated[
        bool,
        typer.Option("--search", help="Also search the drafter's children, scale and width; takes minutes."),
    ] = False,
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
        raise usage(f"--text {str(text)!r} is not a file; name a text file, or .jsonl")
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
        search=search,
    )
    report = check(target, drafter, how, lambda what: print(what, file=sys.stderr, flush=True))
    print(json.dumps(report.as_object()) if json_ else "\n".join(_lines(report)))
    raise typer.Exit(0 if report.fits else FAILED)


@app.command("skip")
def skip_layers(
    target: Annotated[
        str, typer.Argument(help="Target: a Hugging Face folder, or ORG/NAME, or ORG/NAME@REVISION.")
    ],
    text: Annotated[
        Path | None,
        typer.Option(help="Text to continue, or .jsonl with prompts. Default: built-in prompts."),
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, max=1000, help="Continue at most this many prompts.")] = 8,
    tokens: Annotated[int, typer.Option(min=2, max=4096, help="Tokens to generate for each prompt.")] = 48,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="Temperature; 0 is greedy.")] = 0.0,
    dtype: Annotated[
        str, typer.Option(help="Number format: auto, float32, bfloat16, float16 or float64.")
    ] = "auto",
    device: Annotated[str, typer.Option(help="Torch device, such as auto, cpu or cuda.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="Compute threads. Default: by cores.")] = None,
    whole_layers: Annotated[
        bool,
        typer.Option(
            "--whole-layers", help="Skip whole layers only: the search takes a quarter of the passes."
        ),
    ] = False,
    minutes: Annotated[
        float, typer.Option(min=0.1, max=1440, help="Most minutes that the search takes.")
    ] = 10.0,
    json_: Json = False,
) -> None:
    """Find what a target can skip while it drafts for itself, and say whether that pays.

    The search skips the attention or the MLP of a layer at a time, beginning with the one that changes the
    tokens least; where a model's layers cannot be skipped in part, whole layers. A drafter with
    --model TARGET --skip SET then drafts with the rest.

    \b
    Examples:
      outrider models skip models/target
      outrider models skip models/target --whole-layers
      outrider models skip Qwen/Qwen3-8B --dtype bfloat16 --device cuda --text notes.txt --temperature 0.8
    """
    if text is not None and not text.expanduser().is_file():
        raise usage(f"--text {str(text)!r} is not a file; name a text file, or .jsonl")
    try:
        from outrider.pair.skipping import SkipOptions, find_skips
    except ModuleNotFoundError as error:
        raise CommandFailed(f"{error.name} is not installed: pip install 'outrider[verifier]'") from error
    from outrider.runtime.threads import most_threads

    how = SkipOptions(
        dtype=dtype,
        device=device,
        threads=threads or most_threads(),
        text=text,
        prompts=prompts,
        tokens=tokens,
        temperature=temperature,
        whole=whole_layers,
        minutes=minutes,
    )
    found = find_skips(target, how, lambda what: print(what, file=sys.stderr, flush=True))
    if not found:
        raise CommandFailed(
            f"no set was searched in {target} within --minutes {minutes:g}: give more minutes; a model of a "
            "single layer has nothing to skip but its MLP"
        )
    best = max(found, key=lambda one: one.speedup)
    skip = best.written if best.speedup > 1 else ()
    if json_:
        print(json.dumps({"target": target, "sets": [_of_set(one) for one in found], "skip": skip}))
        return
    for one in found:
        print(_line_of_set(one))
    if skip:
        print(f"\n[drafter]\nmodel = {_toml(target)}\nskip = {_toml(skip)}")
    else:
        print("no set pays: drafting would cost more time than it saves")


def _line_of_set(one: "Skipped") -> str:
    return (
        f"skip {','.join(one.written):<30} acceptance {one.acceptance:.0%}, "
        f"break-even {one.cost:.0%}: {one.speedup:.2f} times plain decoding"
    )


def _of_set(one: "Skipped") -> dict[str, Any]:
    return {
        "skip": one.written,
        "acceptance": round(one.acceptance, 4),
        "break_even": round(one.cost, 4),
        "expected_speedup": round(one.speedup, 3),
    }


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
    if report.found is not None:
        found = report.found
        yield (
            f"search      {found.speedup:.2f} times plain decoding, {found.default_speedup:.2f} with the "
            f"defaults; {found.tried} settings tried"
        )
    for role, settings in report.settings().items():
        yield f"\n[{role}]"
        yield from (f"{name} = {_toml(value)}" for name, value in settings.items())


def _toml(value: object) -> str:
    """A value in TOML, which refuses the two halves in which JSON escapes a character such as an emoji."""
    return json.dumps(value, ensure_ascii=False)


def _of_side(side: "Side") -> str:
    if side.refusal:
        return f"{side.source}: refused: {side.refusal}"
    if not side.max_length:
        return f"{side.source}: {side.type}, not loaded"
    return (
        f"{side.source}: {side.type}, {side.vocabulary_size:,} ids, up to {side.max_length:,} positions "
        f"of {side.kv_bytes_per_id / 1024:,.1f} KiB{f', verifies {side.shape}' if side.chains else ''}"
    )
