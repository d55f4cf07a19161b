"""The program `outrider`: its commands and their flags, except those of groups such as `outrider index`.

Modules that do a command's work are imported when it is called, so that `--help` is quick.
"""

import sys
import traceback
from collections.abc import Sequence
from enum import StrEnum
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from outrider.cli import distil, index, keys, memory, models, roles
from outrider.cli.access import Access, ApiKeyFile, Ca, Cert, CertKey
from outrider.cli.asking import chat as chat_command
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
)
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


Float = float | None
Int = int | None


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


class Switch(StrEnum):
    """Values of a flag that turns a feature on or off."""

    ON = "on"
    OFF = "off"


class Distribution(StrEnum):
    """The distribution that log-probabilities are of."""

    RAW = "raw"
    PROCESSED = "processed"


@app.command()
def up(
    model: Annotated[
        str | None,
        typer.Argument(help="The model to serve: a Hugging Face id or folder. Default: the embedded pair."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="TOML file with a table per role, and [up]. Default: $OUTRIDER_CONFIG."),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(help="The same as MODEL; for scripts that give settings as flags."),
    ] = None,
    drafter: Annotated[
        str | None,
        typer.Option(
            help="Drafter model: a folder, an id, `auto` or `none`; A,B starts several. Default: auto, which "
            "looks for a model."
        ),
    ] = None,
    serve_drafter: Annotated[
        bool | None,
        typer.Option(
            "--serve-drafter",
            help="Answer requests with the drafter, or the first of several, too: model NAME:drafter. "
            "Requests must then name their model.",
        ),
    ] = None,
    heads: Annotated[
        list[str] | None,
        typer.Option(
            help="Head that drafts from the target's hidden states: a folder, an id, `eagle` or `medusa` of "
            "the embedded target, or `auto`, the one known for the target; repeatable. Default: none."
        ),
    ] = None,
    amateur: Annotated[
        str | None,
        typer.Option(
            help="Weaker model for contrastive decoding: a folder, an id, or `drafter`, the drafter of the "
            "embedded pair. Default: none."
        ),
    ] = None,
    bind: Annotated[
        str | None,
        typer.Option(help="host:port for clients over gRPC. Default: port 50051, or the next free port."),
    ] = None,
    http_bind: Annotated[
        str | None,
        typer.Option(help="host:port for OpenAI's API. Default: port 8000, or the next free port."),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="Compute threads of the verifier, and of the drafter. Default: measured."),
    ] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Number format of the models. Default: auto.")] = None,
    device: Annotated[str | None, typer.Option(help="Torch device. Default: auto.")] = None,
    passes: Annotated[
        str | None,
        typer.Option(help="`auto`, `eager` or `compiled`: how the models' passes run. Default: auto."),
    ] = None,
    retrieval: Annotated[
        str | None, typer.Option(help="`none` starts no retrieval worker. Default: start one.")
    ] = None,
    corpus: Annotated[
        list[str] | None, typer.Option(help="Draft from this corpus of `outrider index build`; repeatable.")
    ] = None,
    folder: Annotated[
        str | None, typer.Option(help="Keep past outputs in this folder. Default: in memory.")
    ] = None,
    log_level: Annotated[
        LogLevel | None, typer.Option(help="Least severe events to log. Default: warning.")
    ] = None,
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
    address: Annotated[str, typer.Option(help="host:port of the orchestrator, as `outrider up` prints it.")],
    prompt: Annotated[
        str | None, typer.Option(help="Prompt as text; the target's tokenizer adds its special tokens.")
    ] = None,
    ids: Annotated[
        str | None, typer.Option(help="Prompt as token ids, such as 1,2,3; nothing is added to them.")
    ] = None,
    max_tokens: Annotated[Int, typer.Option(help="Generate at most this many tokens. Default: 128.")] = None,
    temperature: Annotated[Float, typer.Option(help="Sampling temperature; 0 is greedy. Default: 1.")] = None,
    top_k: Annotated[Int, typer.Option(help="Sample from the k likeliest tokens. Default: 0, all.")] = None,
    top_p: Annotated[
        Float, typer.Option(help="Sample from the likeliest tokens up to this probability mass. Default: 1.")
    ] = None,
    min_p: Annotated[
        Float, typer.Option(help="Drop tokens less likely than this share of the likeliest. Default: 0.")
    ] = None,
    contrast_strength: Annotated[
        Float, typer.Option(help="Weight of the verifier's amateur against the target. Default: 0, none.")
    ] = None,
    contrast_plausibility: Annotated[
        Float,
        typer.Option(help="With a contrast, drop tokens below this share of the likeliest. Default: 0.1."),
    ] = None,
    repetition_penalty: Annotated[
        Float, typer.Option(help="Penalize tokens of prompt and output. Default: 1, off.")
    ] = None,
    presence_penalty: Annotated[
        Float, typer.Option(help="Subtract from the score of every token in the output. Default: 0.")
    ] = None,
    frequency_penalty: Annotated[
        Float, typer.Option(help="The same for each time that a token occurred. Default: 0.")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End the answer before this string; repeatable.")
    ] = None,
    stop_ids: Annotated[str, typer.Option(help="End the answer at these token ids: 1,2,3.")] = "",
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Continue past end-of-sequence tokens.")
    ] = False,
    min_tokens: Annotated[Int, typer.Option(help="Generate at least this many tokens. Default: 0.")] = None,
    json_schema: Annotated[
        str, typer.Option(help="Answer with JSON of this schema: a file, or the schema itself, {...}.")
    ] = "",
    regex: Annotated[
        str | None, typer.Option(help="Answer with text that this regular expression matches as a whole.")
    ] = None,
    json_object: Annotated[bool, typer.Option("--json-object", help="Answer with a JSON object.")] = False,
    choice: Annotated[
        list[str] | None, typer.Option(help="Answer with this text, or another --choice; repeatable.")
    ] = None,
    lark: Annotated[
        str, typer.Option(help="Lark grammar that the answer must follow: a file, or the grammar itself.")
    ] = "",
    n: Annotated[Int, typer.Option(help="Generate this many answers, 1 to 16. Default: 1.")] = None,
    logprobs: Annotated[
        bool, typer.Option("--logprobs", help="With --json: print each token's log-probability.")
    ] = False,
    top_logprobs: Annotated[
        Int, typer.Option(help="With --logprobs: also print the k likeliest tokens, up to 20. Default: 0.")
    ] = None,
    logprobs_of: Annotated[
        Distribution | None,
        typer.Option(
            help="With --logprobs: of the model's softmax, or of the distribution sampled from. Default: raw."
        ),
    ] = None,
    seed: Annotated[
        Int, typer.Option(help="Seed of the noise, unsigned 64 bits. Default: drawn at random, and printed.")
    ] = None,
    speculation: Annotated[
        Switch, typer.Option(help="off: decode without drafts. The tokens are the same.")
    ] = Switch.ON,
    sources: Annotated[
        str | None,
        typer.Option(help="Use drafts of these sources alone, such as lookup,drafter. Default: all."),
    ] = None,
    nodes: Annotated[
        Int, typer.Option(help="Verify at most this many drafted tokens a round; 0: none.")
    ] = None,
    learn: Annotated[
        Switch, typer.Option(help="off: do not keep the answer to draft from. Default: on.")
    ] = Switch.ON,
    corpora: Annotated[
        str | None, typer.Option(help="Draft from these corpora alone, such as A,B. Default: all.")
    ] = None,
    references: Annotated[
        list[str] | None,
        typer.Option(help="File that the answer may copy from; repeatable, at most 16."),
    ] = None,
    edit: Annotated[
        bool, typer.Option("--edit", help="Draft from the prompt's last document, too; the answer edits it.")
    ] = False,
    criterion: Annotated[
        str | None,
        typer.Option(
            help="Criterion by which drafts are accepted, such as typical:epsilon=0.2; it may "
            "change the answer. Default: none."
        ),
    ] = None,
    policy: Annotated[
        str | None, typer.Option(help="How far drafts go, such as fixed:4. Default: the services' settings.")
    ] = None,
    model: Annotated[
        str, typer.Option(help="Name of the target, where the orchestrator serves several.")
    ] = "",
    session: Annotated[str, typer.Option(help="Name of the session. Default: a new name.")] = "",
    tenant: Annotated[str, typer.Option(help="Tenant that the request belongs to.")] = "",
    timeout: Annotated[Float, typer.Option(help="Give up after this many seconds. Default: never.")] = None,
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
    from outrider.cli.asking import generate as asked
    from outrider.client.options import Options

    options = Options(
        ids=None if ids is None else asked.parse_ids(ids, "--ids"),
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        contrast_strength=contrast_strength,
        contrast_plausibility=contrast_plausibility,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        stop=stop or (),
        stop_ids=asked.parse_ids(stop_ids, "--stop-ids"),
        ignore_eos=ignore_eos,
        min_tokens=min_tokens,
        json_schema=asked.read_schema(json_schema),
        regex=regex,
        json_object=json_object,
        choice=choice or None,
        lark=asked.read_grammar(lark),
        n=n,
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        logprobs_of=None if logprobs_of is None else logprobs_of.value,
        seed=seed,
        speculation=speculation is Switch.ON,
        sources=asked.parse_names(sources, "--sources"),
        nodes=nodes,
        learn=learn is Switch.ON,
        corpora=asked.parse_names(corpora, "--corpora"),
        references=asked.read_references(references or ()),
        edit=edit,
        criterion=asked.parse_criterion(criterion),
        policy=policy,
        model=model,
        session=session,
        tenant=tenant,
        timeout=timeout,
    )
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
        fail(CommandFailed(str(error), status_name(error)), as_json=as_json)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in OUTPUT_ERRORS:
            fail(lose_output(error), as_json=False)
        traceback.print_exc()
        fail(CommandFailed(f"{type(error).__name__}: {error}", "INTERNAL"), as_json=as_json)
    raise SystemExit(status or 0)
