"""`outrider config`: checks a configuration file, and shows the settings that a role would run with.

Modules that do a command's work are imported when it is called.
"""

import json
from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.failures import FAILED, CommandFailed, Json, usage

app = typer.Typer(help="Check a configuration file, and show a role's settings.", rich_markup_mode=None)


@app.command("check")
def check_config(
    file: Annotated[Path, typer.Argument(help="A TOML file with a table per role, and [up].")],
    json_: Json = False,
) -> None:
    """Print all problems of a configuration file; exits with 1 where there are any.

    \b
    Example:
      outrider config check outrider.toml
    """
    from outrider.cli.config.check import check_file

    try:
        checked = check_file(file)
    except ValueError as error:
        raise CommandFailed(str(error), "INVALID_ARGUMENT", FAILED) from error
    if json_:
        print(json.dumps(checked.as_object()))
    else:
        print("\n".join(checked.lines()))
    raise typer.Exit(FAILED if checked.problems else 0)


@app.command("show", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def show_config(
    context: typer.Context,
    role: Annotated[str, typer.Argument(help="orchestrator, verifier, drafter, retrieval or up.")],
    json_: Json = False,
) -> None:
    """Show the settings of a role and the origin of each; secrets are masked.

    Flags of the role may follow, --config FILE among them. Exits with 1 where the role would not start.

    \b
    Examples:
      outrider config show verifier --config outrider.toml
      outrider config show drafter --model models/drafter --kv-mb 64 --json
    """
    from outrider.cli.config.check import kinds, show

    if role not in kinds():
        raise usage(f"no role {role!r}; there are: {', '.join(kinds())}")
    try:
        shown = show(role, context.args)
    except ValueError as error:
        raise usage(str(error)) from error
    print(json.dumps(shown.as_object()) if json_ else "\n".join(shown.lines()))
    raise typer.Exit(FAILED if shown.problems else 0)
