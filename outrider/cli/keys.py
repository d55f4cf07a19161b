"""`outrider keys`: makes API keys for clients of an orchestrator."""

import json
from typing import Annotated

import typer

from outrider.cli.failures import usage

app = typer.Typer(help="Make API keys for clients of an orchestrator.", rich_markup_mode=None)
Whole = Annotated[int | None, typer.Option(min=1, help="Limit for this key. Default: none.")]


@app.callback()
def keys() -> None:
    """Make API keys for clients of an orchestrator."""


@app.command("new")
def new(
    tenant: Annotated[str, typer.Option(help="Tenant of the requests that come with this key.")],
    streams: Whole = None,
    requests_per_minute: Whole = None,
    tokens_per_minute: Whole = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Make an API key. It is printed once and kept nowhere; add its line to the orchestrators' api_keys_file.

    \b
    Example:
      outrider keys new --tenant acme --streams 8 --tokens-per-minute 100000
    """
    from outrider.wire.codec import checked_tenant
    from outrider.wire.keys import key_digest, new_key

    if not checked_tenant(tenant):
        raise usage("--tenant is empty")
    key = new_key()
    quotas = {
        "streams": streams,
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
    }
    line = {"sha256": key_digest(key), "tenant": tenant} | {
        name: most for name, most in quotas.items() if most is not None
    }
    if json_:
        print(json.dumps({"key": key, "line": line}))
    else:
        print(f"key (for the client, shown only now):\n{key}\nline (for api_keys_file):\n{json.dumps(line)}")
