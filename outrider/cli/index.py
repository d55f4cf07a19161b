"""`outrider index`: builds, describes, verifies, merges and removes corpora on disk.

Modules that do a command's work are imported when it is called. Progress goes to standard error.
"""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.failures import CommandFailed, Json, standard_input, usage

if TYPE_CHECKING:
    from retrieval_service.corpus.layout import CorpusHeader
    from retrieval_service.corpus.plan import BuildProgress, Built

app = typer.Typer(help="Manage corpora on disk that the retrieval worker drafts from.", rich_markup_mode=None)

ShardTokens = Annotated[
    int | None,
    typer.Option(
        min=2,
        help="Tokens per shard: large shards need memory to sort, small ones search slower. Default: 2^25.",
    ),
]
Replace = Annotated[
    bool,
    typer.Option("--replace", help="Replace a corpus of other documents that the folder holds."),
]


@app.command("build")
def build_index(
    out: Annotated[
        Path,
        typer.Argument(help="Folder of the corpus; a corpus of the same sources in it is built anew."),
    ],
    sources: Annotated[list[Path] | None, typer.Argument(help="Files, and folders to read whole.")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="The target's tokenizer.json, or a folder that has one.")
    ] = None,
    glob: Annotated[
        list[str] | None,
        typer.Option(help="Read only files of folders that match, such as '*.py'; repeatable."),
    ] = None,
    jsonl_field: Annotated[
        str | None, typer.Option(help="Read lines of JSON objects, with their text under this name.")
    ] = None,
    stdin: Annotated[bool, typer.Option("--stdin", help="Read standard input too.")] = False,
    exclude: Annotated[
        list[Path] | None,
        typer.Option(help="Leave near-copies of the text in this file or folder out; repeatable."),
    ] = None,
    shard_tokens: ShardTokens = None,
    tenant: Annotated[str | None, typer.Option(help="Tenant that owns the corpus. Default: public.")] = None,
    public: Annotated[
        bool, typer.Option("--public", help="Every tenant may use the corpus: the default.")
    ] = False,
    replace: Replace = False,
    json_: Json = False,
) -> None:
    """Build a corpus from text; an interrupted build continues where it stopped.

    A corpus of other documents in the folder stays, and the build is refused, unless --replace is given.

    \b
    Examples:
      outrider index build corpus src --tokenizer models/target --glob '*.py'
      zcat texts.jsonl.gz | outrider index build corpus --tokenizer models/target --stdin --jsonl-field text
    """
    if tokenizer is None:
        raise usage("--tokenizer is missing: ids mean nothing without the target's own")
    if not sources and not stdin:
        raise usage("nothing to read: give files or folders, or --stdin")
    if tenant is not None and public:
        raise usage("give either --tenant or --public")
    with _failing():
        from retrieval_service.corpus.build import build
        from retrieval_service.corpus.encoding import TokenizedText, read_tokenizer
        from retrieval_service.corpus.plan import SHARD_TOKENS, CorpusSettings
        from retrieval_service.corpus.texts import TextSource

        table = read_tokenizer(tokenizer)
        settings = CorpusSettings(table.digest, table.size, tenant, shard_tokens or SHARD_TOKENS)
        texts = TextSource(
            tuple(sources or ()),
            tuple(glob or ()),
            jsonl_field,
            standard_input().buffer if stdin else None,
            (out,),
        )
        kept_out = TextSource(tuple(exclude)) if exclude else None
        with _Meter() as meter:
            source = TokenizedText(texts, table, kept_out)
            built = build(out, settings, source, report=meter, replace=replace)
    _say_built(out, built, as_json=json_)


@app.command("info")
def info_of_index(
    path: Annotated[Path, typer.Argument(help="The corpus' folder.")], json_: Json = False
) -> None:
    """Print what a folder holds: a complete corpus, an unfinished build, or both.

    \b
    Example:
      outrider index info corpus --json
    """
    with _failing():
        from retrieval_service.corpus.manage import describe

        found = describe(path)
    result: dict[str, Any] = {"complete": found.header is not None}
    if found.header is not None:
        result |= _header_object(found.header)
    if found.unfinished is not None:
        left = found.unfinished
        tokens = sum(shard.tokens for shard in left.shards)
        result["unfinished"] = {"generation": left.generation, "shards": len(left.shards), "tokens": tokens}
    lines = [f"{path}: {_in_words(found.header) if found.header else 'under construction'}"]
    if "unfinished" in result:
        lines.append(
            "an unfinished build of generation {generation} has {shards} shards, {tokens} tokens".format(
                **result["unfinished"]
            )
        )
    _print(result, lines, as_json=json_)


@app.command("verify")
def verify_index(
    path: Annotated[Path, typer.Argument(help="The corpus' folder.")], json_: Json = False
) -> None:
    """Check that every file of a corpus is as written; exits with 1 and names the first file that differs.

    \b
    Example:
      outrider index verify corpus
    """
    with _failing():
        from retrieval_service.corpus.manage import verify

        header = verify(path)
    _print(
        {"verified": True, **_header_object(header)},
        [f"{path}: as written: {_in_words(header)}"],
        as_json=json_,
    )


@app.command("merge")
def merge_indexes(
    out: Annotated[Path, typer.Argument(help="The new corpus' folder; may be one of the parts.")],
    parts: Annotated[
        list[Path], typer.Argument(help="Corpora of one tokenizer and one owner, which are kept.")
    ],
    shard_tokens: ShardTokens = None,
    replace: Replace = False,
    json_: Json = False,
) -> None:
    """Merge several corpora into one: searching few full shards is faster than many small ones.

    \b
    Example:
      outrider index merge all monday tuesday wednesday
    """
    with _failing():
        from retrieval_service.corpus.manage import merge
        from retrieval_service.corpus.plan import SHARD_TOKENS

        with _Meter() as meter:
            limit = shard_tokens or SHARD_TOKENS
            built = merge(out, parts, shard_tokens=limit, replace=replace, report=meter)
    _say_built(out, built, as_json=json_)


@app.command("rm")
def remove_index(
    path: Annotated[Path, typer.Argument(help="The corpus' folder.")], json_: Json = False
) -> None:
    """Remove a corpus or an unfinished build; processes that have it open can continue to use it.

    \b
    Example:
      outrider index rm corpus
    """
    with _failing():
        from retrieval_service.corpus.manage import remove

        remove(path)
    _print({"removed": str(path)}, [f"{path}: removed"], as_json=json_)


@contextmanager
def _failing() -> Iterator[None]:
    """Raises CommandFailed for an error of a corpus inside, and for a library that is not installed."""
    try:
        from retrieval_service.corpus.errors import CorpusError
    except ModuleNotFoundError as error:
        raise _missing(error) from error
    try:
        yield
    except CorpusError as error:
        raise CommandFailed(str(error), error.code) from error
    except ModuleNotFoundError as error:
        raise _missing(error) from error


def _missing(error: ModuleNotFoundError) -> CommandFailed:
    return CommandFailed(f"{error.name} is not installed: pip install 'outrider[retrieval]'")


class _Meter:
    """Prints progress on standard error: one rewritten line on a terminal, else a line every ten seconds."""

    def __init__(self) -> None:
        self._terminal = sys.stderr is not None and sys.stderr.isatty()
        self._started = time.monotonic()
        self._printed = self._started

    def __enter__(self) -> "_Meter":
        return self

    def __exit__(self, *_: object) -> None:
        if self._terminal:
            print(file=sys.stderr)

    def __call__(self, progress: "BuildProgress") -> None:
        now = time.monotonic()
        pause = 0.1 if self._terminal else 10
        if sys.stderr is None or now - self._printed < pause:
            return
        self._printed = now
        text = (
            f"{progress.stage}: {progress.documents:,} documents, {progress.tokens:,} tokens,"
            f" {progress.shards} shards complete, {now - self._started:.0f} s"
        )
        print(
            f"\r\x1b[K{text}" if self._terminal else text, end="" if self._terminal else "\n", file=sys.stderr
        )
        sys.stderr.flush()


def _say_built(out: Path, built: "Built", *, as_json: bool) -> None:
    result = {
        **_header_object(built.header),
        "kept_shards": built.kept_shards,
        "left_out": built.left_out,
        "encode_seconds": round(built.encode_seconds, 3),
        "index_seconds": round(built.index_seconds, 3),
    }
    lines = [f"{out}: {_in_words(built.header)}"]
    if not built.header.documents:
        lines.append("the corpus is empty: no document was found; look at the paths and at --glob")
    if built.left_out:
        lines.append("left out: " + ", ".join(f"{count:,} {what}" for what, count in built.left_out.items()))
    _print(result, lines, as_json=as_json)


def _header_object(header: "CorpusHeader") -> dict[str, Any]:
    return {
        "generation": header.generation,
        "tokenizer_digest": header.tokenizer,
        "vocabulary_size": header.vocabulary,
        "tenant": header.tenant,
        "tokens": header.tokens,
        "documents": header.documents,
        "shards": len(header.shards),
        "bytes": header.size,
    }


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def _in_words(header: "CorpusHeader") -> str:
    owner = "public" if header.tenant is None else f"tenant {header.tenant}'s"
    return (
        f"{header.tokens:,} tokens of {_counted(header.documents, 'document')}"
        f" in {_counted(len(header.shards), 'shard')},"
        f" {header.size / 1e6:,.1f} MB, {owner}, generation {header.generation},"
        f" tokenizer {header.tokenizer[:12]}"
    )


def _print(result: dict[str, Any], lines: list[str], *, as_json: bool) -> None:
    print(json.dumps(result) if as_json else "\n".join(lines))
