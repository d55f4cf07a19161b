"""`outrider distil`: trains a head for a target from text and from past outputs.

The work is done by `training.heads`, which is imported when the command is called. Progress goes to standard
error.
"""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.failures import CommandFailed, Json, usage

if TYPE_CHECKING:
    from rich.progress import TaskID

KINDS = "medusa, hydra, eagle, eagle3, mtp, pass, lm, block"


def distil(
    target: Annotated[str, typer.Option(help="Target that the head is for: a Hugging Face folder or id.")],
    out: Annotated[Path, typer.Option(help="Folder of the finished head, replaced if it exists.")],
    text: Annotated[list[Path] | None, typer.Argument(help="Text files, and folders to read whole.")] = None,
    kind: Annotated[
        str, typer.Option(help=f"Kind of head: {KINDS} (the last two are small models).")
    ] = "eagle",
    past: Annotated[
        list[Path] | None,
        typer.Option(help="File of past outputs that `outrider memory export` wrote; repeatable."),
    ] = None,
    glob: Annotated[
        list[str] | None, typer.Option(help="Read only files of folders that match this; repeatable.")
    ] = None,
    held_out: Annotated[
        Path | None,
        typer.Option(help="JSON lines with a `prompt` each, to measure with. Default: a part of the text."),
    ] = None,
    work: Annotated[
        Path | None,
        typer.Option(help="Folder of checkpoints, which several kinds may share. Default: OUT.work."),
    ] = None,
    data: Annotated[
        str,
        typer.Option(help="Who writes the text: fixed (it stays as it is), target, drafter, or mixed."),
    ] = "mixed",
    written: Annotated[
        float, typer.Option(help="With --data mixed: share of the rows that a model continues.")
    ] = 0.5,
    drafter: Annotated[
        str | None,
        typer.Option(
            help="Model that continues the rows of --data drafter and half the rows of --data mixed; for the "
            "kinds lm and block also the model from which training starts."
        ),
    ] = None,
    boost_of: Annotated[
        str | None,
        typer.Option(help="For the kind lm: a first drafter, from whose misses the new drafter learns most."),
    ] = None,
    boost: Annotated[
        float | None,
        typer.Option(
            help="With --boost-of: weight of tokens that the first drafter has right. Default: 0.2."
        ),
    ] = None,
    divergence: Annotated[
        str, typer.Option(help="forward-kl, reverse-kl, jsd, tvd, or cross-entropy with the text itself.")
    ] = "forward-kl",
    tokens: Annotated[int, typer.Option(help="Tokens of text, without past outputs.")] = 1_000_000,
    window: Annotated[int, typer.Option(help="Tokens of a training row.")] = 512,
    steps: Annotated[int, typer.Option(help="Training steps. Default: some passes over all rows.")] = 0,
    batch: Annotated[int, typer.Option(help="Tokens of a step.")] = 3072,
    depth: Annotated[
        int,
        typer.Option(
            help="Medusa's or Hydra's heads, simulated steps of a head of one layer, look-ahead tokens, or a "
            "block's places. Default: 3; eagle3: 4; block: 6."
        ),
    ] = 0,
    draft_vocabulary: Annotated[
        int,
        typer.Option(
            help="For the kind eagle3: number of tokens that the head may draft, the most frequent ones of "
            "the text. Default: as many as make up 98 % of the text."
        ),
    ] = 0,
    rate: Annotated[float, typer.Option(help="Peak learning rate. Default: by kind.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of all random choices.")] = 0,
    device: Annotated[str, typer.Option(help="Torch device, such as cpu or cuda.")] = "cpu",
    threads: Annotated[int | None, typer.Option(min=1, help="Compute threads. Default: by cores.")] = None,
    json_: Json = False,
) -> None:
    """Train a head or a small drafter for a target from text, past outputs, or both.

    After an interruption at any moment, the same command continues.

    \b
    Examples:
      outrider distil notes/ --kind eagle --target models/target --out heads/eagle
      outrider distil --past acme.jsonl --kind medusa --target Qwen/Qwen3-0.6B --out heads/m --device cuda
    """
    try:
        from training.heads.job import distil as run
        from training.heads.recipe import DistilOptions
        from training.loop import Interrupted
    except ModuleNotFoundError as error:
        raise CommandFailed(f"{error.name} is not installed: pip install 'outrider[verifier]'") from error
    if boost is not None and boost_of is None:
        raise usage(f"--boost {boost:g} without --boost-of; name the first drafter, or leave --boost out")
    from outrider.runtime.threads import most_threads
    from retrieval_service.corpus.texts import TextSource

    options = DistilOptions(
        kind=kind,
        target=target,
        out=out,
        work=work or out.with_name(f"{out.name}.work"),
        text=tuple(text or ()),
        past=tuple(past or ()),
        globs=tuple(glob or ()),
        held_out=held_out,
        data=data,
        written=written,
        drafter=drafter,
        boost_of=boost_of,
        boost=0.2 if boost is None else boost,
        divergence=divergence,
        tokens=tokens,
        window=window,
        steps=steps,
        batch=batch,
        depth=depth,
        draft_vocabulary=draft_vocabulary,
        rate=rate,
        seed=seed,
        device=device,
        threads=threads or most_threads(),
    )
    with _Bars() as bars:
        try:
            result = run(options, TextSource(options.text, options.globs), bars.show)
        except Interrupted as error:
            raise CommandFailed(
                "interrupted, with a checkpoint; run the same command to go on", "ABORTED"
            ) from error
    print(json.dumps(result) if json_ else "\n".join(_lines(result)))


class _Bars:
    """A bar per stage on standard error."""

    def __enter__(self) -> "_Bars":
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("{task.description:<14}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[remark]}"),
            console=Console(file=sys.stderr),
        )
        self._tasks: dict[str, TaskID] = {}
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, stage: str, done: int, total: int, remark: str = "") -> None:
        """Moves a stage's bar."""
        if stage not in self._tasks:
            self._tasks[stage] = self._progress.add_task(stage, total=total, remark=remark)
        self._progress.update(self._tasks[stage], completed=done, total=total, remark=remark)


def _lines(result: dict[str, Any]) -> list[str]:
    lines = [
        f"{result['kind']} head in {result['out']}: {result['parameters']:,} parameters, "
        f"{result['bytes'] / 1e6:.1f} MB, {result['steps']:,} steps"
    ]
    for name, found in result["acceptance"].items():
        before, after = found["before"]["acceptance_length"], found["after"]["acceptance_length"]
        lines.append(f"held out, {name}: {after:.2f} tokens a round, {before:.2f} before training")
    for name, found in result.get("boost", {}).items():
        first, both = (found[key]["acceptance_length"] for key in ("first", "both"))
        lines.append(f"held out, {name}: {both:.2f} tokens a round by both drafters, {first:.2f} by one")
    return lines
