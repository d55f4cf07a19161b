"""The flags of `outrider distil`, each with its type and its help."""

from pathlib import Path
from typing import Annotated

import typer

from training.heads.kinds import KINDS

Target = Annotated[str, typer.Option(help="Target that the head is for: a Hugging Face folder or id.")]
Out = Annotated[Path, typer.Option(help="Folder of the finished head; an earlier head there is replaced.")]
Text = Annotated[list[Path] | None, typer.Argument(help="Text files, and folders to read whole.")]
Kind = Annotated[str, typer.Option(help=f"Kind of head: {', '.join(KINDS)} (the last two are small models).")]
Past = Annotated[
    list[Path] | None,
    typer.Option(help="File of past outputs that `outrider memory export` wrote; repeatable."),
]
Glob = Annotated[
    list[str] | None, typer.Option(help="Read only files of folders that match this; repeatable.")
]
HeldOut = Annotated[
    Path | None,
    typer.Option(help="JSON lines with a `prompt` each, to measure with. Default: a part of the text."),
]
Work = Annotated[
    Path | None,
    typer.Option(help="Folder of checkpoints, which several kinds may share. Default: OUT.work."),
]
Data = Annotated[
    str,
    typer.Option(help="Who writes the text: fixed (it stays as it is), target, drafter, or mixed."),
]
Written = Annotated[float, typer.Option(help="With --data mixed: share of the rows that a model continues.")]
Drafter = Annotated[
    str | None,
    typer.Option(
        help="Model that continues the rows of --data drafter and half the rows of --data mixed; for the "
        "kinds lm and block also the model from which training starts."
    ),
]
BoostOf = Annotated[
    str | None,
    typer.Option(help="For the kind lm: a first drafter, from whose misses the new drafter learns most."),
]
Boost = Annotated[
    float | None,
    typer.Option(help="With --boost-of: weight of tokens that the first drafter has right. Default: 0.2."),
]
Divergence = Annotated[
    str, typer.Option(help="forward-kl, reverse-kl, jsd, tvd, or cross-entropy with the text itself.")
]
Tokens = Annotated[int, typer.Option(help="Tokens of text, without past outputs.")]
Window = Annotated[int, typer.Option(help="Tokens of a training row.")]
Steps = Annotated[int, typer.Option(help="Training steps. Default: some passes over all rows.")]
Batch = Annotated[int, typer.Option(help="Tokens of a step.")]
Depth = Annotated[
    int,
    typer.Option(
        help="Heads of medusa, blockwise or hydra, simulated steps of a head of one layer, look-ahead "
        "tokens, or a block's places. Default: 3; eagle3: 4; block: 6."
    ),
]
DraftVocabulary = Annotated[
    int,
    typer.Option(
        help="For the kind eagle3: number of tokens that the head may draft, the most frequent ones of "
        "the text. Default: as many as make up 98 % of the text."
    ),
]
Rate = Annotated[float, typer.Option(help="Peak learning rate. Default: by kind.")]
Seed = Annotated[int, typer.Option(help="Seed of all random choices.")]
Device = Annotated[str, typer.Option(help="Torch device, such as cpu or cuda.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Compute threads. Default: by cores.")]
