"""The flags of `outrider up`, each with its type and its help."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class LogLevel(StrEnum):
    """The least severe events to log."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class Dtype(StrEnum):
    """Number formats in which models compute."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


Model = Annotated[
    str | None,
    typer.Argument(help="The model to serve: a Hugging Face id or folder. Default: the embedded pair."),
]
Config = Annotated[
    Path | None,
    typer.Option(help="TOML file with a table per role, and [up]. Default: $OUTRIDER_CONFIG."),
]
Target = Annotated[
    str | None,
    typer.Option(help="The same as MODEL; for scripts that give settings as flags."),
]
Drafter = Annotated[
    str | None,
    typer.Option(
        help="Drafter model: a folder, an id, `auto` or `none`; A,B starts several. Default: auto, which "
        "looks for a model."
    ),
]
ServeDrafter = Annotated[
    bool | None,
    typer.Option(
        "--serve-drafter",
        help="Answer requests with the drafter, or the first of several, too: model NAME:drafter. "
        "Requests must then name their model.",
    ),
]
Heads = Annotated[
    list[str] | None,
    typer.Option(
        help="Head that drafts from the target's hidden states: a folder, an id, `eagle` or `medusa` of "
        "the embedded target, or `auto`, the known head of the target; repeatable. Default: none."
    ),
]
Amateur = Annotated[
    str | None,
    typer.Option(
        help="Weaker model for contrastive decoding: a folder, an id, or `drafter`, the drafter of the "
        "embedded pair. Default: none."
    ),
]
Bind = Annotated[
    str | None,
    typer.Option(help="host:port for clients over gRPC. Default: port 50051, or the next free port."),
]
HttpBind = Annotated[
    str | None,
    typer.Option(help="host:port for OpenAI's API. Default: port 8000, or the next free port."),
]
Threads = Annotated[
    int | None,
    typer.Option(min=1, help="Compute threads of the verifier, and of the drafter. Default: measured."),
]
DtypeFlag = Annotated[Dtype | None, typer.Option(help="Number format of the models. Default: auto.")]
WeightDtypeFlag = Annotated[
    str | None,
    typer.Option(help="`auto`, `bfloat16` or `int8`: how linear layers keep their weights. Default: auto."),
]
Device = Annotated[str | None, typer.Option(help="Torch device. Default: auto.")]
Passes = Annotated[
    str | None,
    typer.Option(help="`auto`, `eager` or `compiled`: how the models' passes run. Default: auto."),
]
Retrieval = Annotated[str | None, typer.Option(help="`none` starts no retrieval worker. Default: start one.")]
Corpus = Annotated[
    list[str] | None, typer.Option(help="Draft from this corpus of `outrider index build`; repeatable.")
]
Folder = Annotated[str | None, typer.Option(help="Keep past outputs in this folder. Default: in memory.")]
LogLevelFlag = Annotated[LogLevel | None, typer.Option(help="Least severe events to log. Default: warning.")]
