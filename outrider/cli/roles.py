"""`outrider serve ROLE`: replaces this process by a service, which reads the flags itself."""

from typing import NoReturn

import typer

app = typer.Typer(
    help="Run one service; `outrider serve ROLE --help` lists settings.",
    rich_markup_mode=None,
)
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@app.command("verifier", context_settings=_PASS_ON, help="Decode many sessions with one target.")
def serve_verifier(context: typer.Context) -> None:
    _serve("verifier_service", context)


@app.command("drafter", context_settings=_PASS_ON, help="Draft for verifiers with a small model.")
def serve_drafter(context: typer.Context) -> None:
    _serve("drafter_service", context)


@app.command("retrieval", context_settings=_PASS_ON, help="Draft from corpora, past outputs and documents.")
def serve_retrieval(context: typer.Context) -> None:
    _serve("retrieval_service", context)


@app.command(
    "orchestrator", context_settings=_PASS_ON, help="Serve clients, with --verifier A,B --drafter C,D."
)
def serve_orchestrator(context: typer.Context) -> None:
    _serve("orchestrator", context)


def _serve(module: str, context: typer.Context) -> NoReturn:
    from outrider.cli.modules import become

    become(["-m", module, *context.args])
