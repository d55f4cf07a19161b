"""`outrider edge`: OpenAI's API on this machine, answered by the cloud while a local model drafts."""

import json
import os
import signal
import socket
import threading
from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.access import Access, ApiKeyFile, Ca, Cert, CertKey
from outrider.cli.failures import Json, usage

DraftWith = Annotated[
    str,
    typer.Option(
        help="URL of a running llama-server; or a GGUF file, which needs the extra [edge-llama]; or a "
        "folder with a model, which needs torch."
    ),
]
Preferred = Annotated[
    str,
    typer.Option(
        help="`latency`: least time per token. `balanced`: fewest passes of the target without being "
        "slower. `economy`: fewest passes at up to four times the time per token, or at up to 100 ms per "
        "token where that is more."
    ),
]
FixedMode = Annotated[
    str | None,
    typer.Option(help="Keep to `cloud`, `hinting`, `waiting` or `pipelined`. Default: chosen by measuring."),
]


def edge(
    server: Annotated[str, typer.Option(help="URL of the orchestrator's HTTP API.")],
    draft_with: DraftWith,
    address: Annotated[
        str,
        typer.Option(help="host:port of the same orchestrator over gRPC. Default: a WebSocket at --server."),
    ] = "",
    draft_vocabulary: Annotated[
        Path | None,
        typer.Option(help="Copy of the llama-server's GGUF file, if the file is on another machine."),
    ] = None,
    preference: Preferred = "balanced",
    mode: FixedMode = None,
    bind: Annotated[
        str, typer.Option(help="host:port for apps on this machine; port 0 picks a free port.")
    ] = "127.0.0.1:8081",
    api_key_file: ApiKeyFile = "",
    ca: Ca = "",
    cert: Cert = "",
    cert_key: CertKey = "",
    json_: Json = False,
) -> None:
    """Serve OpenAI's API to this machine's apps: the cloud answers, a local model drafts ahead.

    The text is the cloud model's, token for token. GET /edge says how the device is used, and why.

    \b
    Examples:
      outrider edge --server http://cloud:8000 --draft-with http://127.0.0.1:8080
      outrider edge --server http://cloud:8000 --draft-with drafter-q8.gguf
      outrider edge --server http://cloud:8000 --address cloud:50051 --draft-with models/drafter
    """
    from outrider.edge.edge_drafter import EdgeDrafter
    from outrider.edge.endpoint.cloud import Cloud
    from outrider.edge.endpoint.server import EdgeEndpoint

    host, port = _free(bind)
    access = Access(api_key_file, ca, cert, cert_key)
    key = access.api_key()
    cloud = Cloud(server, key, ca or None)
    with (
        EdgeDrafter(
            address or server,
            draft_with,
            preference=preference,
            mode=mode,
            vocabulary=draft_vocabulary,
            wait_for_ready=False,
            api_key=key,
            ca=ca or None,
            cert=cert or None,
            cert_key=cert_key or None,
        ) as drafter,
        EdgeEndpoint(drafter, cloud, host, port) as endpoint,
    ):
        ended = _signalled_end()  # first: who reads the line may send a signal at once
        if json_:
            print(json.dumps({"http": endpoint.url}), flush=True)
        else:
            print(f"OpenAI's API: {endpoint.url}/v1; how the device is used: {endpoint.url}/edge", flush=True)
        ended.wait()


def _free(bind: str) -> tuple[str, int]:
    """Host and port of an address that can be served on now: a model takes long to load."""
    host, _, port = bind.rpartition(":")
    if not host or not port.isdigit() or int(port) >= 2**16:
        raise usage(f"--bind {bind!r} is not host:port")
    try:
        socket.create_server((host.strip("[]"), int(port)), family=_family(host)).close()
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else str(error)
        raise usage(f"--bind {bind}: {why}; give another port, or 0 for any free one") from error
    return host, int(port)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if host.startswith("[") else socket.AF_INET


def _signalled_end() -> threading.Event:
    """An event that SIGTERM or Ctrl-C sets from now on."""
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    return ended
