"""The commands and their flags. What they do is imported when they are called, so that `--help` is quick."""

import sys
import traceback
from collections.abc import Sequence
from enum import StrEnum
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from outrider.cli import config as config_commands
from outrider.cli import index, keys, looking, memory, models, roles
from outrider.cli.access import Access, ApiKeyFile, Ca, Cert, CertKey
from outrider.cli.failures import INTERRUPTED, OUTPUT_ERRORS, CommandFailed, fail, lose_output, usage
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
app.add_typer(looking.app)
app.add_typer(memory.app, name="memory")


class Switch(StrEnum):
    """A flag that is said either way."""

    ON = "on"
    OFF = "off"


class Level(StrEnum):
    """The least severe events to log."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class Distribution(StrEnum):
    """What log-probabilities are of."""

    RAW = "raw"
    PROCESSED = "processed"


class Dtype(StrEnum):
    """What models compute in."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output, an error included.")]
Floats = float | None
Whole = int | None


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
        Whole, typer.Option(min=1, help="Compute threads of verifier and drafter each. Default: by cores.")
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


@app.command()
def generate(
    address: Annotated[str, typer.Option(help="host:port of an orchestrator, as `outrider up` prints it.")],
    prompt: Annotated[str | None, typer.Option(help="Text; gets what the target's tokenizer adds.")] = None,
    ids: Annotated[str | None, typer.Option(help="Token ids in place of text, as they are: 1,2,3.")] = None,
    max_tokens: Annotated[Whole, typer.Option(help="The most ids to generate. Default: 128.")] = None,
    temperature: Annotated[Floats, typer.Option(help="0 is greedy. Default: 1.")] = None,
    top_k: Annotated[Whole, typer.Option(help="Keep the k likeliest tokens; 0: all, the default.")] = None,
    top_p: Annotated[
        Floats, typer.Option(help="Keep the likeliest tokens up to this mass. Default: 1.")
    ] = None,
    min_p: Annotated[
        Floats, typer.Option(help="Drop tokens below this share of the likeliest. Default: 0.")
    ] = None,
    repetition_penalty: Annotated[Floats, typer.Option(help="Over prompt and output. Default: 1.")] = None,
    presence_penalty: Annotated[Floats, typer.Option(help="Over the output. Default: 0.")] = None,
    frequency_penalty: Annotated[Floats, typer.Option(help="Over the output. Default: 0.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="A string that ends the request; repeatable.")
    ] = None,
    stop_ids: Annotated[str, typer.Option(help="Token ids that end the request: 1,2,3.")] = "",
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past end-of-sequence ids.")] = False,
    min_tokens: Annotated[Whole, typer.Option(help="The least ids to generate. Default: 0.")] = None,
    json_schema: Annotated[
        str, typer.Option(help="The answer is JSON of this schema: a file, or the text itself, {...}.")
    ] = "",
    regex: Annotated[str | None, typer.Option(help="The answer is text that all of this matches.")] = None,
    json_object: Annotated[bool, typer.Option("--json-object", help="The answer is a JSON object.")] = False,
    n: Annotated[Whole, typer.Option(help="How many answers, 1 to 16. Default: 1.")] = None,
    logprobs: Annotated[
        bool, typer.Option("--logprobs", help="With --json: each id's log-probability.")
    ] = False,
    top_logprobs: Annotated[
        Whole, typer.Option(help="With --logprobs: also the k likeliest ids', up to 20. Default: 0.")
    ] = None,
    logprobs_of: Annotated[
        Distribution | None,
        typer.Option(
            help="With --logprobs: of the model's softmax, or of what is sampled from. Default: raw."
        ),
    ] = None,
    seed: Annotated[Whole, typer.Option(help="Unsigned 64 bits. Default: drawn, and printed.")] = None,
    speculation: Annotated[
        Switch, typer.Option(help="off: plain decoding. The ids are the same.")
    ] = Switch.ON,
    sources: Annotated[str, typer.Option(help="Draft from these alone: lookup,drafter. Default: all.")] = "",
    nodes: Annotated[Whole, typer.Option(help="The most drafted nodes in one round; 0: plain.")] = None,
    learn: Annotated[
        Switch, typer.Option(help="off: what is generated is not kept to draft from. Default: on.")
    ] = Switch.ON,
    corpora: Annotated[str, typer.Option(help="Draft from these corpora alone: A,B. Default: all.")] = "",
    model: Annotated[str, typer.Option(help="Which target, where several are served.")] = "",
    session: Annotated[str, typer.Option(help="The session's name. Default: a new one.")] = "",
    tenant: Annotated[str, typer.Option(help="Who asks.")] = "",
    timeout: Annotated[Floats, typer.Option(help="Seconds until the request is given up.")] = None,
    api_key_file: ApiKeyFile = "",
    ca: Ca = "",
    cert: Cert = "",
    cert_key: CertKey = "",
    json_: Json = False,
) -> None:
    """Complete a prompt.

    \b
    Examples:
      outrider generate --address 127.0.0.1:50051 --prompt "def fibonacci(n):" --temperature 0
      outrider generate --address 127.0.0.1:50051 --ids 12,7,99 --max-tokens 32 --seed 7 --json
      outrider generate --address 127.0.0.1:50051 --prompt "class" --n 3 --logprobs --top-logprobs 5 --json
    """
    from outrider.cli.generate import parse_ids, parse_names, read_schema, run_generate
    from outrider.options import Options

    if (prompt is None) == (ids is None):
        raise usage("give either --prompt or --ids")
    if logprobs and not json_:
        raise usage("--logprobs needs --json")
    options = Options(
        ids=None if ids is None else parse_ids(ids, "--ids"),
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        stop=stop or (),
        stop_ids=parse_ids(stop_ids, "--stop-ids"),
        ignore_eos=ignore_eos,
        min_tokens=min_tokens,
        json_schema=read_schema(json_schema),
        regex=regex,
        json_object=json_object,
        n=n,
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        logprobs_of=None if logprobs_of is None else logprobs_of.value,
        seed=seed,
        speculation=speculation is Switch.ON,
        sources=parse_names(sources),
        nodes=nodes,
        learn=learn is Switch.ON,
        corpora=parse_names(corpora),
        model=model,
        session=session,
        tenant=tenant,
        timeout=timeout,
    )
    run_generate(address, prompt, options, Access(api_key_file, ca, cert, cert_key), as_json=json_)


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
