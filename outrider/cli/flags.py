"""Flags that several commands have. What a caller shows an orchestrator is in `access`."""

from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output, an error included.")]
