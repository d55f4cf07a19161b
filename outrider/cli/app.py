"""The commands and their flags. What they do is imported when they are called, so that `--help` is quick."""

import sys
import traceback
from collections.abc import Sequence
from enum import StrEnum
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from outrider.cli import asking, index, keys, looking, memory, models, roles
from outrider.cli import config as config_commands
from outrider.cli.failures import INTERRUPTED, OUTPUT_ERRORS, CommandFailed, fail, lose_output
from outrider.cli.flags import Json
from speculative.errors import OutriderError

app = typer.Typer(
    name="outrider",
    help="Speculative decoding split into services: the verifier decodes, all others ride ahead and draft.",
    epilog="Begin with `outrider demo`, or with `outrider up`, and `outrider generate` in another terminal.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(roles.app, name="serve")
app.add_typer(index.app, name="index")
app.add_typer(config_commands.app, name="config")
app.add_typer(models.app, name="models")
app.add_typer(keys.app, name="keys")
app.add_typer(asking.app)
app.add_typer(looking.app)
app.add_typer(memory.app, name="memory")


class Level(StrEnum):
    """The least severe events to log."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class Dtype(StrEnum):
    """What models compute in."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


@app.command()
def up(
    config: Annotated[
        Path | None,
        typer.Option(help="A TOML file with a table per role, and [up]. Default: OUTRIDER_CONFIG."),
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="The target: a Hugging Face folder or id. Default: the embedded pair.")
    ] = None,
    drafter: Annotated[
        str | None, typer.Option(help="The drafter: a folder, an id, or `none`. Default: none with --target.")
    ] = None,
    bind: Annotated[
        str | None, typer.Option(help="host:port of the front door. Default: 127.0.0.1 and a free port.")
    ] = None,
    http_bind: Annotated[str | None, typer.Option(help="The same for OpenAI's API over HTTP.")] = None,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="Compute threads of verifier and drafter each. Default: by cores."),
    ] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="What the models compute in. Default: float32.")] = None,
    device: Annotated[str | None, typer.Option(help="The torch device. Default: cpu.")] = None,
    retrieval: Annotated[
        str | None, typer.Option(help="`none` leaves the retrieval worker out. Default: it runs.")
    ] = None,
    corpus: Annotated[
        list[str] | None, typer.Option(help="A corpus of `outrider index build` to draft from; repeatable.")
    ] = None,
    folder: Annotated[
        str | None, typer.Option(help="Where past outputs are kept. Default: in memory.")
    ] = None,
    log_level: Annotated[Level | None, typer.Option(help="What the services log. Default: warning.")] = None,
    json_: Json = False,
) -> None:
    """Run verifier, drafter, retrieval and orchestrator on this machine, until SIGTERM or Ctrl-C.

    \b
    Examples:
      outrider up
      outrider up --target Qwen/Qwen3-0.6B --drafter none --bind 127.0.0.1:50051
      outrider up --config outrider.toml
    """
    flags = {name: value for name, value in locals().items() if name != "json_"}
    from outrider.cli.up import run_up
    from outrider.cli.up_settings import read_up

    raise typer.Exit(run_up(read_up(flags), as_json=json_))


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
)
def bench(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Which benchmark; a wrong name lists them.")],
    json_: Json = False,
) -> None:
    """Run a benchmark of the clone; what follows NAME is passed on to it.

    \b
    Example:
      outrider bench offline --json
    """
    from outrider.cli.modules import become, find_benchmark

    if name == "--help":
        typer.echo(context.get_help())
        return
    become([str(find_benchmark(name)), *(["--json"] if json_ else []), *context.args])


@app.command()
def demo() -> None:
    """Watch the embedded pair: held-out prompts, every token coloured by who drafted it, then the figures.

    Exits 1 unless every completion is, id for id, what plain decoding gives.
    """
    from outrider.cli.demo import run_demo

    raise typer.Exit(run_demo())


@app.command()
def version(json_: Json = False) -> None:
    """Print the version."""
    import json

    from outrider import __version__

    print(json.dumps({"version": __version__}) if json_ else f"outrider {__version__}")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs a command and ends the process: 0, 1 (failed), 2 (usage) or 130 (Ctrl-C)."""
    told = (sys.argv[1:] if arguments is None else list(arguments)) or ["--help"]
    as_json = "--json" in told
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # what a terminal cannot show must not end an answer
    try:
        status = app(told, prog_name="outrider", standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()
    except typer.TyperException as error:
        fail(CommandFailed(error.format_message(), "INVALID_ARGUMENT", error.exit_code), as_json=as_json)
    except typer.Abort:
        raise SystemExit(INTERRUPTED) from None
    except CommandFailed as failure:
        fail(failure, as_json=as_json)
    except OutriderError as error:
        from outrider.cli.statuses import status_name

        fail(CommandFailed(str(error), status_name(error)), as_json=as_json)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in OUTPUT_ERRORS:
            fail(lose_output(error), as_json=False)
        traceback.print_exc()
        fail(CommandFailed(f"{type(error).__name__}: {error}", "INTERNAL"), as_json=as_json)
    raise SystemExit(status or 0)
