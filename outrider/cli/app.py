"""The program `outrider`: its commands and their flags, except those of groups such as `outrider index`.

Modules that do a command's work are imported when it is called, so that `--help` is quick.
"""

import sys
import traceback
from collections.abc import Sequence
from io import TextIOWrapper
from typing import Annotated, NoReturn

import typer

from outrider.cli import distil, index, keys, memory, models, roles
from outrider.cli.access import Access, ApiKeyFile, Ca, Cert, CertKey
from outrider.cli.asking import chat as chat_command
from outrider.cli.asking import request_flags
from outrider.cli.config import commands as config_commands
from outrider.cli.edge import edge
from outrider.cli.failures import (
    INTERRUPTED,
    OUTPUT_ERRORS,
    CommandFailed,
    Json,
    fail,
    lose_output,
    status_name,
    usage,
    with_advice,
)
from outrider.cli.local import up_flags
from outrider.cli.observe import commands as observe
from speculative.errors import OutriderError

app = typer.Typer(
    name="outrider",
    help="Serve language models with speculative decoding: the verifier decodes, other services draft ahead.",
    epilog="Start with `outrider demo`, or with `outrider up`, then `outrider generate` in another terminal.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(roles.app, name="serve")
app.add_typer(index.app, name="index")
app.add_typer(config_commands.app, name="config")
app.add_typer(models.app, name="models")
app.add_typer(keys.app, name="keys")
app.add_typer(memory.app, name="memory")
app.command()(chat_command.chat)


@app.command()
def up(
    model: up_flags.Model = None,
    config: up_flags.Config = None,
    target: up_flags.Target = None,
    drafter: up_flags.Drafter = None,
    serve_drafter: up_flags.ServeDrafter = None,
    heads: up_flags.Heads = None,
    amateur: up_flags.Amateur = None,
    bind: up_flags.Bind = None,
    http_bind: up_flags.HttpBind = None,
    threads: up_flags.Threads = None,
    dtype: up_flags.DtypeFlag = None,
    weight_dtype: up_flags.WeightDtypeFlag = None,
    device: up_flags.Device = None,
    passes: up_flags.Passes = None,
    retrieval: up_flags.Retrieval = None,
    corpus: up_flags.Corpus = None,
    folder: up_flags.Folder = None,
    log_level: up_flags.LogLevelFlag = None,
    json_: Json = False,
) -> None:
    """Serve a model on this machine until SIGTERM or Ctrl-C: downloads the model and starts all services.

    The services are verifier, drafter, retrieval and orchestrator.

    \b
    Examples:
      outrider up
      outrider up Qwen/Qwen3-8B
      outrider up Qwen/Qwen3-8B --drafter none --http-bind 0.0.0.0:8000
      outrider up --config outrider.toml
    """
    flags = {name: value for name, value in locals().items() if name not in ("json_", "model")}
    if model is not None:
        if target not in (None, model):
            raise usage(f"the model is given twice: {model} and --target {target}; leave one of the two out")
        flags["target"] = model
    from outrider.cli.local.up import run_up
    from outrider.cli.local.up_settings import read_up

    raise typer.Exit(run_up(read_up(flags), as_json=json_))


@app.command()
def generate(
    address: request_flags.Address,
    prompt: request_flags.Prompt = None,
    ids: request_flags.Ids = None,
    max_tokens: request_flags.MaxTokens = None,
    temperature: request_flags.Temperature = None,
    top_k: request_flags.TopK = None,
    top_p: request_flags.TopP = None,
    min_p: request_flags.MinP = None,
    contrast_strength: request_flags.ContrastStrength = None,
    contrast_plausibility: request_flags.ContrastPlausibility = None,
    repetition_penalty: request_flags.RepetitionPenalty = None,
    presence_penalty: request_flags.PresencePenalty = None,
    frequency_penalty: request_flags.FrequencyPenalty = None,
    stop: request_flags.Stop = None,
    stop_ids: request_flags.StopIds = "",
    ignore_eos: request_flags.IgnoreEos = False,
    min_tokens: request_flags.MinTokens = None,
    json_schema: request_flags.JsonSchema = "",
    regex: request_flags.Regex = None,
    json_object: request_flags.JsonObject = False,
    choice: request_flags.Choice = None,
    lark: request_flags.Lark = "",
    n: request_flags.Answers = None,
    logprobs: request_flags.Logprobs = False,
    top_logprobs: request_flags.TopLogprobs = None,
    logprobs_of: request_flags.LogprobsOf = None,
    seed: request_flags.Seed = None,
    speculation: request_flags.Speculation = request_flags.Switch.ON,
    sources: request_flags.Sources = None,
    nodes: request_flags.Nodes = None,
    learn: request_flags.Learn = request_flags.Switch.ON,
    corpora: request_flags.Corpora = None,
    references: request_flags.References = None,
    edit: request_flags.Edit = False,
    criterion: request_flags.Criterion = None,
    policy: request_flags.Policy = None,
    model: request_flags.Model = "",
    session: request_flags.Session = "",
    tenant: request_flags.Tenant = "",
    timeout: request_flags.Timeout = None,
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
    given = locals()
    from outrider.cli.asking import generate as asked

    options = asked.options_of(given)
    asked.check_together(prompt, options, as_json=json_)
    asked.run_generate(address, prompt, options, Access(api_key_file, ca, cert, cert_key), as_json=json_)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
)
def bench(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Name of the benchmark; a wrong name prints them all.")],
    json_: Json = False,
) -> None:
    """Run a benchmark of this repository.

    Flags after NAME are the benchmark's own.

    \b
    Example:
      outrider bench offline --json
    """
    from outrider.cli.modules import become, find_benchmark

    if name == "--help":
        typer.echo(context.get_help())
        return
    become([str(find_benchmark(name)), *(["--json"] if json_ else []), *context.args])


app.command()(observe.top)
app.command()(observe.explain)
app.command()(distil.distil)
app.command("edge")(edge)


@app.command()
def demo(
    passes: Annotated[
        str,
        typer.Option(help="`eager`, or `compiled`: by a C++ compiler, once, in a minute or two."),
    ] = "eager",
) -> None:
    """Show the speedup of the embedded pair.

    Completes held-out prompts with and without drafts; tokens are coloured by source.

    Exits 1 unless every completion has exactly the tokens of plain decoding.
    """
    from outrider.cli.local.demo import run_demo

    raise typer.Exit(run_demo(passes))


@app.command()
def version(json_: Json = False) -> None:
    """Print the version."""
    import json

    from outrider import __version__

    print(json.dumps({"version": __version__}) if json_ else f"outrider {__version__}")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs a command and ends the process: 0, 1 (failed), 2 (usage) or 130 (Ctrl-C)."""
    words = (sys.argv[1:] if arguments is None else list(arguments)) or ["--help"]
    as_json = "--json" in words
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a character that the terminal lacks must not end an answer
    try:
        status = app(words, prog_name="outrider", standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()
    except typer.TyperException as error:
        fail(CommandFailed(error.format_message(), "INVALID_ARGUMENT", error.exit_code), as_json=as_json)
    except typer.Abort:
        raise SystemExit(INTERRUPTED) from None
    except CommandFailed as failure:
        fail(failure, as_json=as_json)
    except OutriderError as error:
        fail(CommandFailed(with_advice(error), status_name(error)), as_json=as_json)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in OUTPUT_ERRORS:
            fail(lose_output(error), as_json=False)
        if isinstance(error, UnicodeEncodeError) and any(error.object in word for word in words):
            fail(usage(f"{error.object!r} is not UTF-8; give names and texts in UTF-8"), as_json=as_json)
        traceback.print_exc()
        fail(CommandFailed(f"{type(error).__name__}: {error}", "INTERNAL"), as_json=as_json)
    raise SystemExit(status or 0)
