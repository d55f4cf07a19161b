"""The commands that look at what runs: `outrider top` and `outrider explain`."""

from typing import Annotated

import typer

from outrider.cli.access import Access, ApiKeyFile, Ca, Cert, CertKey
from outrider.cli.flags import Json

app = typer.Typer()


@app.command()
def top(
    addresses: Annotated[
        list[str],
        typer.Argument(
            metavar="ADDRESS",
            help="host:port of each process's metrics, or a file with what `outrider up --json` printed; "
            "- reads that from standard input.",
        ),
    ],
    interval: Annotated[
        float, typer.Option(min=0.1, max=3600, help="Seconds between two readings; rates are over these.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Show it once, and end.")] = False,
    json_: Json = False,
) -> None:
    """Watch what each process does: requests, tokens a second, acceptance by source, memory, step time.

    \b
    Examples:
      outrider top 127.0.0.1:9464 127.0.0.1:9465
      outrider up --json > up.json & outrider top up.json
      outrider top up.json --once --json
    """
    from outrider.cli.top import run_top

    raise typer.Exit(run_top(addresses, interval_s=interval, once=once, as_json=json_))


@app.command()
def explain(
    session: Annotated[
        str, typer.Argument(help="Its name: as `generate` said it; over HTTP the `id`, and -0.")
    ],
    address: Annotated[str, typer.Option(help="host:port of an orchestrator, as `outrider up` prints it.")],
    tenant: Annotated[str, typer.Option(help="Whose session it is.")] = "",
    choice: Annotated[int, typer.Option(min=0, help="Which answer, where there were several.")] = 0,
    api_key_file: ApiKeyFile = "",
    ca: Ca = "",
    cert: Cert = "",
    cert_key: CertKey = "",
    json_: Json = False,
) -> None:
    """Tell how a session went, round by round: what was drafted, verified and accepted, and what it took.

    \b
    Example:
      outrider explain s-1f2e3d4c5b6a7988 --address 127.0.0.1:50051
    """
    from outrider.cli.explain import run_explain

    access = Access(api_key_file, ca, cert, cert_key)
    run_explain(address, session, tenant=tenant, choice=choice, access=access, as_json=json_)
