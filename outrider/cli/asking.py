"""The command that asks: `outrider generate`, with a flag for each thing that a request may say."""

from enum import StrEnum
from typing import Annotated

import typer

from outrider.cli.access import Access, ApiKeyFile, Ca, Cert, CertKey
from outrider.cli.failures import usage
from outrider.cli.flags import Json

app = typer.Typer()
Floats = float | None
Whole = int | None


class Switch(StrEnum):
    """A flag that is said either way."""

    ON = "on"
    OFF = "off"


class Distribution(StrEnum):
    """What log-probabilities are of."""

    RAW = "raw"
    PROCESSED = "processed"


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
    sources: Annotated[
        str | None, typer.Option(help="Draft from these alone: lookup,drafter. Default: all.")
    ] = None,
    nodes: Annotated[Whole, typer.Option(help="The most drafted nodes in one round; 0: plain.")] = None,
    learn: Annotated[
        Switch, typer.Option(help="off: what is generated is not kept to draft from. Default: on.")
    ] = Switch.ON,
    corpora: Annotated[
        str | None, typer.Option(help="Draft from these corpora alone: A,B. Default: all.")
    ] = None,
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
    from outrider.cli.generate import check_drafting, parse_ids, parse_names, read_schema, run_generate
    from outrider.client.options import Options

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
        sources=parse_names(sources, "--sources"),
        nodes=nodes,
        learn=learn is Switch.ON,
        corpora=parse_names(corpora, "--corpora"),
        model=model,
        session=session,
        tenant=tenant,
        timeout=timeout,
    )
    check_drafting(options)
    run_generate(address, prompt, options, Access(api_key_file, ca, cert, cert_key), as_json=json_)
