"""Writes a tenant's past outputs to a file: JSON lines, of which the first says whose outputs they are."""

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from outrider.cli.failures import CommandFailed

EXPORT_S = 600.0
_FORMAT = "outrider past outputs 1"


class ExportedPast(NamedTuple):
    """How much a file holds."""

    outputs: int
    tokens: int


def write_past(path: Path, tenant: str, worker: Any) -> ExportedPast:
    """Writes the file whole or not at all, readable by its owner alone.

    Args:
        worker: a stub of the Retrieval service.

    Raises CommandFailed if the file cannot be written, or if a part of it cannot be removed.
    """
    from outrider.v1 import retrieval_pb2

    partial = path.parent / f".{path.name}.partial"
    tokens = 0
    answers = worker.ExportPast(retrieval_pb2.ExportPastRequest(tenant=tenant), timeout=EXPORT_S)
    first = next(answers)
    header = {
        "format": _FORMAT,
        "tenant": tenant,
        "tokenizer": first.tokenizer_digest,
        "outputs": first.outputs,
    }
    try:
        descriptor = os.open(partial, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
    except OSError as error:
        raise CommandFailed(f"{path} cannot be written: {error.strerror}") from error
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(json.dumps(header) + "\n")
            for answer in answers:
                ids = list(answer.output.ids)
                tokens += len(ids)
                file.write(json.dumps({"session": answer.output.session, "ids": ids}) + "\n")
        os.replace(partial, path)
    except OSError as error:
        raise CommandFailed(f"{path} cannot be written: {error.strerror}") from error
    finally:
        _remove(partial)  # the tenant's outputs, if the worker was lost or Ctrl-C came
    return ExportedPast(int(first.outputs), tokens)


def _remove(partial: Path) -> None:
    try:
        partial.unlink(missing_ok=True)
    except OSError as error:
        raise CommandFailed(
            f"{partial} holds outputs of the tenant and cannot be removed: {error.strerror}; delete it"
        ) from error
