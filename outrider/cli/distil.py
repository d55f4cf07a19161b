"""`outrider distil`: trains a head for a target from text and from past outputs.

The work is done by `training.heads`, which is imported when the command is called. Progress goes to standard
error.
"""

import errno
import json
import sys
from typing import TYPE_CHECKING, Any

from outrider.cli import distil_flags as flags
from outrider.cli.failures import CommandFailed, Json, usage
from training.heads.kinds import KINDS

if TYPE_CHECKING:
    from rich.progress import TaskID

    from training.heads.recipe import DistilOptions


def distil(
    target: flags.Target,
    out: flags.Out,
    text: flags.Text = None,
    kind: flags.Kind = "eagle",
    past: flags.Past = None,
    glob: flags.Glob = None,
    held_out: flags.HeldOut = None,
    work: flags.Work = None,
    data: flags.Data = "mixed",
    written: flags.Written = 0.5,
    drafter: flags.Drafter = None,
    boost_of: flags.BoostOf = None,
    boost: flags.Boost = None,
    divergence: flags.Divergence = "forward-kl",
    tokens: flags.Tokens = 1_000_000,
    window: flags.Window = 512,
    steps: flags.Steps = 0,
    batch: flags.Batch = 3072,
    depth: flags.Depth = 0,
    draft_vocabulary: flags.DraftVocabulary = 0,
    rate: flags.Rate = 0.0,
    seed: flags.Seed = 0,
    device: flags.Device = "cpu",
    threads: flags.Threads = None,
    json_: Json = False,
) -> None:
    """Train a head or a small drafter for a target from text, past outputs, or both.

    After an interruption at any moment, the same command continues.

    \b
    Examples:
      outrider distil notes/ --kind eagle --target models/target --out heads/eagle
      outrider distil --past acme.jsonl --kind medusa --target Qwen/Qwen3-0.6B --out heads/m --device cuda
    """
    if kind not in KINDS:
        raise usage(f"--kind {kind!r} is not one of {', '.join(KINDS)}")
    if boost is not None and boost_of is None:
        raise usage(f"--boost {boost:g} without --boost-of; name the first drafter, or leave --boost out")
    try:
        from training.heads.recipe import DistilOptions
    except ModuleNotFoundError as error:
        raise CommandFailed(f"{error.name} is not installed: pip install 'outrider[verifier]'") from error
    from outrider.runtime.threads import most_threads

    options = DistilOptions(
        kind=kind,
        target=target,
        out=out,
        work=work or out.parent / f"{out.name}.work",
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
    result = _trained(options)
    print(json.dumps(result) if json_ else "\n".join(_lines(result)))


def _trained(options: "DistilOptions") -> dict[str, Any]:
    """Trains, with a bar per stage; returns the outcome. Raises CommandFailed where Ctrl-C ends it."""
    from retrieval_service.corpus.texts import TextSource
    from training.heads.job import distil as run
    from training.loop import Interrupted

    with _Bars() as bars:
        try:
            return run(options, TextSource(options.text, options.globs), bars.show)
        except Interrupted as error:
            raise CommandFailed(
                "interrupted, with a checkpoint; run the same command to go on", "ABORTED"
            ) from error
        except OSError as error:
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)  # a write does not know its file's name
            where = error.filename or (f"work folder {options.work}" if is_full else "")
            where = f"{where}: " if where else ""
            raise CommandFailed(f"{where}{error.strerror or error}; run the same command to go on") from error


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
