"""The commands `outrider top` and `outrider explain`, with their flags."""

from typing import Annotated

import typer

from outrider.cli.access import Access, ApiKeyFile, Ca, Cert, CertKey
from outrider.cli.failures import Json


def top(
    addresses: Annotated[
        list[str],
        typer.Argument(
            metavar="ADDRESS",
            help="host:port of each process's metrics, or a file with the output of `outrider up --json`; "
            "- reads that output from standard input.",
        ),
    ],
    interval: Annotated[
        float, typer.Option(min=0.1, max=3600, help="Seconds between two readings; rates are over this time.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one table and exit.")] = False,
    json_: Json = False,
) -> None:
    """Show what each process does, live.

    The table has requests, tokens per second, acceptance by source, memory and step time.

    \b
    Examples:
      outrider top 127.0.0.1:9464 127.0.0.1:9465
      outrider up --json > up.json & outrider top up.json
      outrider top up.json --once --json
    """
    from outrider.cli.observe.top import run_top

    raise typer.Exit(run_top(addresses, interval_s=interval, once=once, as_json=json_))


def explain(
    session: Annotated[
        str,
        typer.Argument(help="Name of the session, as `generate --json` prints it; over HTTP: `id`-0."),
    ],
    address: Annotated[str, typer.Option(help="host:port of the orchestrator, as `outrider up` prints it.")],
    tenant: Annotated[str, typer.Option(help="Tenant that the session belongs to.")] = "",
    choice: Annotated[int, typer.Option(min=0, help="Number of the answer, if the request had several.")] = 0,
    api_key_file: ApiKeyFile = "",
    ca: Ca = "",
    cert: Cert = "",
    cert_key: CertKey = "",
    tree: Annotated[
        bool, typer.Option("--tree", help="Show the tree of drafted tokens of each round.")
    ] = False,
    json_: Json = False,
) -> None:
    """Print a session's rounds, with drafts and times.

    Each round shows the tokens drafted (offered), verified (admitted) and accepted, and its time. With
    --tree, each of the last 64 rounds shows the verified tokens as a tree.

    \b
    Example:
      outrider explain s-1f2e3d4c5b6a7988 --address 127.0.0.1:50051
    """
    from outrider.cli.observe.explain import run_explain

    access = Access(api_key_file, ca, cert, cert_key)
    run_explain(address, session, tenant=tenant, choice=choice, access=access, tree=tree, as_json=json_)
