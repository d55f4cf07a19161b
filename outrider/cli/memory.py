"""`outrider memory`: lists, extends and deletes what a running retrieval worker drafts from.

Modules that do a command's work are imported when it is called.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.access import operator_channel, take_operator_certificate
from outrider.cli.failures import CommandFailed, Json, standard_input, usage

if TYPE_CHECKING:
    from outrider.v1 import retrieval_pb2

app = typer.Typer(help="Manage what a running retrieval worker drafts from.", rich_markup_mode=None)
app.callback()(take_operator_certificate)

CALL_S = 60.0
BUILD_S = 24 * 3600.0
LONGEST_NAME = 128
_HASH_DIGITS = 16

Address = Annotated[str, typer.Option(help="host:port of the worker, as `outrider up` prints it.")]
Tenant = Annotated[str, typer.Option(help="Name of the tenant. Default: the tenant without a name.")]
Owner = Annotated[str, typer.Option(help="Tenant that owns the corpus.")]
Public = Annotated[bool, typer.Option("--public", help="Let every tenant use the corpus.")]
Sources = Annotated[list[Path], typer.Argument(help="Files, and folders to read whole.")]
Globs = Annotated[
    list[str] | None,
    typer.Option(help="Read only files of folders that match, such as '*.py'; repeatable."),
]


@app.command("list")
def list_corpora(address: Address, tenant: Tenant = "", json_: Json = False) -> None:
    """List the corpora that a tenant may use: its own and the public ones.

    \b
    Example:
      outrider memory list --address 127.0.0.1:40001 --tenant acme
    """
    from outrider.v1 import retrieval_pb2

    with _worker(address) as worker:
        listed = worker.ListCorpora(retrieval_pb2.ListCorporaRequest(tenant=tenant), timeout=CALL_S)
    _print(
        {"corpora": [_corpus_object(corpus) for corpus in listed.corpora]},
        [_in_words(corpus) for corpus in listed.corpora] or ["no corpora"],
        as_json=json_,
    )


@app.command("stats")
def show_stats(address: Address, json_: Json = False) -> None:
    """Print how much the worker holds for all tenants together.

    \b
    Example:
      outrider memory stats --address 127.0.0.1:40001
    """
    from outrider.v1 import retrieval_pb2

    with _worker(address) as worker:
        held = worker.Stats(retrieval_pb2.StatsRequest(), timeout=CALL_S)
    result = {field.name: getattr(held, field.name) for field in held.DESCRIPTOR.fields}
    _print(result, [f"{name.replace('_', ' ')}: {value:,}" for name, value in result.items()], as_json=json_)


@app.command("build")
def build_corpus(
    name: Annotated[str, typer.Argument(help="Name of the corpus; a corpus of this name is replaced.")],
    address: Address,
    sources: Annotated[list[Path] | None, typer.Argument(help="Files, and folders to read whole.")] = None,
    tenant: Owner = "",
    public: Public = False,
    glob: Globs = None,
    jsonl_field: Annotated[
        str | None, typer.Option(help="Read lines of JSON objects, with their text under this name.")
    ] = None,
    stdin: Annotated[bool, typer.Option("--stdin", help="Read standard input too.")] = False,
    json_: Json = False,
) -> None:
    """Send text to the worker, which builds a corpus of it and drafts from it; sessions continue meanwhile.

    \b
    Example:
      outrider memory build source src docs --public --glob '*.py' --address 127.0.0.1:40001
    """
    if not sources and not stdin:
        raise usage("nothing to read: give files or folders, or --stdin")
    key = _owned(name, tenant, public)
    with _worker(address) as worker:
        from outrider.v1 import retrieval_pb2
        from retrieval_service.corpus.texts import TextSource

        # Not sys.stdin: the interpreter aborts at exit if a thread still reads from sys.stdin.
        piped = open(standard_input().fileno(), "rb", closefd=False) if stdin else None  # noqa: SIM115
        texts = TextSource(tuple(sources or ()), tuple(glob or ()), jsonl_field, piped)

        def messages() -> "Iterator[retrieval_pb2.BuildCorpusRequest]":
            yield retrieval_pb2.BuildCorpusRequest(start=key)
            for text in texts:
                yield retrieval_pb2.BuildCorpusRequest(text=text)

        made = _sent(worker.BuildCorpus, messages(), BUILD_S)
    _print(_corpus_object(made), [_in_words(made)], as_json=json_)


@app.command("load")
def load_corpus(
    name: str, address: Address, tenant: Owner = "", public: Public = False, json_: Json = False
) -> None:
    """Load a corpus from the worker's folder: one that was unloaded, or that was put there meanwhile.

    \b
    Example:
      outrider memory load source --public --address 127.0.0.1:40001
    """
    key = _owned(name, tenant, public)
    with _worker(address) as worker:
        from outrider.v1 import retrieval_pb2

        loaded = worker.LoadCorpus(retrieval_pb2.LoadCorpusRequest(name=key), timeout=CALL_S)
    _print(_corpus_object(loaded), [_in_words(loaded)], as_json=json_)


@app.command("unload")
def unload_corpus(
    name: str,
    address: Address,
    tenant: Owner = "",
    public: Public = False,
    remove: Annotated[bool, typer.Option("--remove", help="Delete its files too, damaged or not.")] = False,
    json_: Json = False,
) -> None:
    """Stop drafting from a corpus.

    \b
    Example:
      outrider memory unload source --public --remove --address 127.0.0.1:40001
    """
    key = _owned(name, tenant, public)
    with _worker(address) as worker:
        from outrider.v1 import retrieval_pb2

        worker.UnloadCorpus(retrieval_pb2.UnloadCorpusRequest(name=key, remove=remove), timeout=CALL_S)
    _print(
        {"unloaded": name, "removed": remove},
        [f"{name}: {'removed' if remove else 'unloaded'}"],
        as_json=json_,
    )


@app.command("add")
def add_documents(
    sources: Sources, address: Address, tenant: Tenant = "", glob: Globs = None, json_: Json = False
) -> None:
    """Add files as documents of a tenant, each under its path; a document of the same path is replaced.

    \b
    Example:
      outrider memory add docs --tenant acme --address 127.0.0.1:40001
    """
    with _worker(address) as worker:
        from outrider.v1 import retrieval_pb2
        from retrieval_service.corpus.texts import TextSource

        def messages() -> "Iterator[retrieval_pb2.AddDocumentsRequest]":
            for path in TextSource(tuple(sources), tuple(glob or ())).files():
                text = "".join(TextSource((path,)))
                if text:
                    document = retrieval_pb2.Document(name=_document_name(os.fsencode(path)), text=text)
                    yield retrieval_pb2.AddDocumentsRequest(tenant=tenant, document=document)

        added = _sent(worker.AddDocuments, messages(), BUILD_S)
    result = {"documents": added.documents}
    _print(result, [f"{added.documents:,} documents of the tenant"], as_json=json_)


def _document_name(path: bytes) -> str:
    """The name of a file's document: its path.

    If the path is too long for a name or is not UTF-8, the name is a hash of the whole path and then the end
    of the path.
    """
    name = path.decode("utf-8", "replace")
    if len(name) <= LONGEST_NAME and name.encode() == path:
        return name
    return f"{hashlib.sha256(path).hexdigest()[:_HASH_DIGITS]}-{name[_HASH_DIGITS + 1 - LONGEST_NAME :]}"


def _names_of(path: bytes) -> Iterator[str]:
    """The names that a file's document may have: earlier versions named a long path by its end."""
    yield _document_name(path)
    name = path.decode("utf-8", "replace")
    if len(name) > LONGEST_NAME:
        yield name[-LONGEST_NAME:]


@app.command("drop")
def drop_documents(
    address: Address,
    names: Annotated[
        list[str] | None, typer.Argument(help="Names under which the documents were added.")
    ] = None,
    tenant: Tenant = "",
    everything: Annotated[bool, typer.Option("--all", help="Remove all documents of the tenant.")] = False,
    json_: Json = False,
) -> None:
    """Remove documents of a tenant, from disk too: by the paths of their files, or by other names.

    It is an error if the tenant has none of these documents.

    \b
    Example:
      outrider memory drop docs/plan.md --tenant acme --address 127.0.0.1:40001
    """
    if bool(names) == everything:
        raise usage("give either names or --all")
    with _worker(address) as worker:
        from outrider.v1 import retrieval_pb2

        known = [known for name in names or () for known in _names_of(os.fsencode(name))]
        request = retrieval_pb2.RemoveDocumentsRequest(tenant=tenant, names=known)
        removed = worker.RemoveDocuments(request, timeout=CALL_S).removed
    if names and not removed:
        whose = f"tenant {tenant!r}" if tenant else "the tenant without a name"
        raise CommandFailed(f"{whose} has no document {' or '.join(map(repr, names))}", "NOT_FOUND")
    _print({"removed": removed}, [f"{removed:,} documents removed"], as_json=json_)


@app.command("export")
def export_past(
    out: Annotated[Path, typer.Argument(help="File to write; an existing file is replaced.")],
    address: Address,
    tenant: Tenant = "",
    json_: Json = False,
) -> None:
    """Write a tenant's past outputs to a file for `outrider distil --past`.

    The worker keeps only outputs of requests that allowed learning. The file is not encrypted: delete the
    file, and heads trained on it, when you forget the tenant.

    \b
    Example:
      outrider memory export acme.jsonl --tenant acme --address 127.0.0.1:40001
    """
    with _worker(address) as worker:
        from outrider.cli.past_file import write_past

        written = write_past(out, tenant, worker)
    result = {"tenant": tenant, "outputs": written.outputs, "tokens": written.tokens, "file": str(out)}
    _print(result, [f"{out}: {written.outputs:,} past outputs, {written.tokens:,} tokens"], as_json=json_)


@app.command("forget")
def forget(
    address: Address,
    tenant: Tenant = "",
    session: Annotated[
        str, typer.Option(help="Session whose past output to forget, in all of its choices.")
    ] = "",
    everything: Annotated[
        bool, typer.Option("--all", help="Forget all past output and all documents of the tenant.")
    ] = False,
    json_: Json = False,
) -> None:
    """Delete for good what was learnt from a session, or from a whole tenant: from memory and disk.

    \b
    Example:
      outrider memory forget --tenant acme --session s-17 --address 127.0.0.1:40001
    """
    if bool(session) == everything:
        raise usage("give either --session or --all")
    with _worker(address) as worker:
        from outrider.v1 import retrieval_pb2

        worker.Forget(retrieval_pb2.ForgetRequest(tenant=tenant, session=session), timeout=CALL_S)
    whose = f"session {session!r} of tenant {tenant!r}" if session else f"tenant {tenant!r}"
    _print({"forgotten": session or None, "tenant": tenant}, [f"{whose}: forgotten"], as_json=json_)


@contextmanager
def _worker(address: str) -> Iterator[Any]:
    """A stub of the worker. Raises OutriderError inside the block."""
    from outrider.v1.retrieval_pb2_grpc import RetrievalStub
    from outrider.wire.status import rpc_errors

    with operator_channel("retrieval", address) as channel, rpc_errors():
        yield RetrievalStub(channel)


def _sent(call: Any, messages: Iterator[Any], timeout: float) -> Any:
    """Sends a stream of messages; returns the answer. Raises an error of `messages`, which ends the call."""
    failures: list[Exception] = []

    def safely() -> Iterator[Any]:
        try:
            yield from messages
        except Exception as error:
            failures.append(error)
            answer.cancel()

    answer = call.future(safely(), timeout=timeout)
    try:
        return answer.result()
    except Exception:
        if failures:
            raise failures[0] from None
        raise


def _owned(name: str, tenant: str, public: bool) -> "retrieval_pb2.CorpusName":
    if public == bool(tenant):
        raise usage("give either --tenant or --public")
    from outrider.v1 import retrieval_pb2

    return retrieval_pb2.CorpusName(name=name, tenant=tenant, public=public)


def _corpus_object(corpus: "retrieval_pb2.Corpus") -> dict[str, Any]:
    return {
        "name": corpus.name.name,
        "tenant": None if corpus.name.public else corpus.name.tenant,
        "tokens": corpus.tokens,
        "documents": corpus.documents,
        "bytes": corpus.bytes,
    }


def _in_words(corpus: "retrieval_pb2.Corpus") -> str:
    owner = "public" if corpus.name.public else f"tenant {corpus.name.tenant}'s"
    return f"{corpus.name.name}: {corpus.tokens:,} tokens of {corpus.documents:,} documents, {owner}"


def _print(result: dict[str, Any], lines: list[str], *, as_json: bool) -> None:
    print(json.dumps(result) if as_json else "\n".join(lines))
