"""`outrider memory` with a running worker: corpora, documents and past output."""

import fcntl
import json
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import grpc
import pytest

from outrider.runtime.children import ServiceProcess
from outrider.v1 import retrieval_pb2
from outrider.v1.retrieval_pb2_grpc import RetrievalStub
from tests.cli.inside import Ended, Run, ended
from tests.integration.live import heed_interrupts, until

ROOT = Path(__file__).resolve().parents[2]
MODEL = str(ROOT / "models/target")


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    folder = tmp_path_factory.mktemp("memory")
    flags = ["--tokenizer", MODEL, "--embeddings", MODEL, "--folder", str(folder)]
    process = ServiceProcess.start("retrieval", "retrieval_service", flags)
    try:
        process.wait_ready(250)
        yield process
    finally:
        process.stop(10.0)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], worker: ServiceProcess) -> Run:
    def run(*arguments: str | Path, address: str = worker.address) -> Ended:
        return ended(capsys, "memory", *arguments, "--address", address)

    return run


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    for number in range(3):
        (tmp_path / f"{number}.py").write_text(f"def function_{number}(value):\n    return value\n" * 20)
    (tmp_path / "rubbish.bin").write_bytes(bytes(range(256)))
    return tmp_path


def test_a_corpus_is_built_listed_unloaded_loaded_and_removed(run: Run, texts: Path) -> None:
    made = run("build", "source", texts, "--tenant", "acme", "--glob", "*.py", "--json").said
    assert (made["name"], made["tenant"], made["documents"]) == ("source", "acme", 3)
    assert run("list", "--tenant", "acme", "--json").said["corpora"] == [made]
    assert run("list", "--tenant", "other").out == "no corpora\n"
    assert run("stats", "--json").said["corpus_tokens"] == made["tokens"]
    assert run("unload", "source", "--tenant", "acme").out == "source: unloaded\n"
    again = run("load", "source", "--tenant", "acme")
    assert again.out == f"source: {made['tokens']:,} tokens of 3 documents, tenant acme's\n"
    assert run("unload", "source", "--tenant", "acme", "--remove").out == "source: removed\n"
    gone = run("load", "source", "--tenant", "acme", "--json")
    assert (gone.status, gone.said["error"]["code"]) == (1, "NOT_FOUND")


def test_a_corpus_is_built_from_standard_input(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lines").write_text('{"body": "one two three"}\n{"body": "four"}\n')
    with (tmp_path / "lines").open() as lines:
        monkeypatch.setattr(sys, "stdin", lines)
        made = run("build", "lines", "--stdin", "--jsonl-field", "body", "--public")
    assert made.out.endswith("tokens of 2 documents, public\n")
    assert run("unload", "lines", "--public", "--remove").out == "lines: removed\n", "other tests count all"


def test_ctrl_c_ends_a_build_that_waits_for_standard_input(worker: ServiceProcess) -> None:
    with waiting_build("typed", worker) as command:
        assert command.stdin is not None
        command.stdin.write(b"a first line\n")
        command.stdin.flush()
        until(lambda: not unread(command.stdin))
        command.send_signal(signal.SIGINT)
        assert command.wait(60) == 130
        assert command.stderr is not None
        assert command.stderr.read() == b""


def test_a_build_that_waits_for_standard_input_fails_in_one_line_if_the_worker_refuses_it(
    worker: ServiceProcess,
) -> None:
    with waiting_build("no/name", worker) as command:
        assert command.wait(60) == 1
        assert command.stderr is not None
        assert command.stderr.read().count(b"\n") == 1


def waiting_build(name: str, worker: ServiceProcess) -> "subprocess.Popen[bytes]":
    """A build of a corpus that reads a pipe to which nobody has written yet."""
    words = ("build", name, "--stdin", "--public", "--address", worker.address)
    return subprocess.Popen(
        [sys.executable, "-m", "outrider.cli", "memory", *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        preexec_fn=heed_interrupts,
    )


def unread(pipe: IO[bytes] | None) -> int:
    """Number of bytes in a pipe that its reader has not taken yet."""
    assert pipe is not None
    return struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, b"\0" * 4))[0]  # type: ignore[no-any-return]


def test_files_become_documents_by_their_paths_and_are_dropped(run: Run, texts: Path) -> None:
    assert run("add", texts, "--tenant", "acme", "--json").said == {"documents": 3}
    assert run("add", texts / "0.py", "--tenant", "acme", "--json").said == {"documents": 3}
    assert run("drop", texts / "0.py", texts / "rubbish.bin", "--tenant", "acme", "--json").said == {
        "removed": 1
    }
    assert run("drop", "--all", "--tenant", "other", "--json").said == {"removed": 0}
    for tenant, name in (("other", "1.py"), ("acme", "unknown.py")):
        nothing = run("drop", name, "--tenant", tenant)
        assert (nothing.status, nothing.out) == (1, "")
        assert f"tenant {tenant!r} has no document {name!r}" in nothing.err
    assert run("stats", "--json").said["documents"] == 2
    assert run("forget", "--all", "--tenant", "acme").out == "tenant 'acme': forgotten\n"
    assert run("stats", "--json").said["documents"] == 0


def test_a_session_is_forgotten(run: Run) -> None:
    done = run("forget", "--session", "s-17", "--tenant", "acme", "--json")
    assert (done.status, done.said) == (0, {"forgotten": "s-17", "tenant": "acme"})


def test_past_outputs_are_exported_to_a_file_that_its_owner_alone_reads(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "past.jsonl"
    done = run("export", file, "--tenant", "acme", "--json")
    assert (done.status, done.said["outputs"]) == (0, 0)
    header = json.loads(file.read_text())
    assert (header["tenant"], header["outputs"], len(header["tokenizer"])) == ("acme", 0, 64)
    assert file.stat().st_mode & 0o777 == 0o600
    nowhere = run("export", tmp_path / "nowhere" / "past.jsonl", "--tenant", "acme")
    assert (nowhere.status, "cannot be written" in nowhere.err) == (1, True)


@pytest.mark.parametrize("name", [".", "", "a" * 300])
def test_a_file_that_cannot_be_written_for_an_export_is_one_line(
    run: Run, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run("export", name, "--tenant", "acme")
    assert (done.status, done.err.count("\n"), "cannot be written" in done.err) == (1, 1, True)
    assert not list(tmp_path.iterdir())


def test_a_file_of_any_name_becomes_a_document(run: Run, texts: Path) -> None:
    for name in ("caf\udce9.py", "caf\udce8.py"):
        (texts / name).write_text("def of_another_age(value):\n    return value\n" * 20)
    assert run("add", texts, "--tenant", "old", "--json").said == {"documents": 5}
    assert run("drop", texts / "caf\udce9.py", "--tenant", "old", "--json").said == {"removed": 1}
    run("forget", "--all", "--tenant", "old")


def test_files_whose_long_paths_end_alike_are_documents_of_their_own(run: Run, tmp_path: Path) -> None:
    ends = ["c" * 120, "same.py"]
    paths = [tmp_path.joinpath(first, *ends) for first in ("a", "b")]
    for path in paths:
        path.parent.mkdir(parents=True)
        path.write_text(f"def of_{path.parts[-3]}(value):\n    return value\n" * 20)
    assert run("add", tmp_path, "--tenant", "deep", "--json").said == {"documents": 2}
    for path in paths:
        assert run("drop", path, "--tenant", "deep", "--json").said == {"removed": 1}


def test_a_document_that_an_earlier_version_named_by_the_end_of_a_long_path_is_dropped_by_the_path(
    run: Run, worker: ServiceProcess
) -> None:
    path = f"/{'a' * 60}/{'b' * 60}/{'c' * 60}.py"
    document = retrieval_pb2.Document(name=path[-128:], text="def of_another_age(value):\n    return value\n")
    with grpc.insecure_channel(worker.address) as channel:
        earlier = retrieval_pb2.AddDocumentsRequest(tenant="old", document=document)
        RetrievalStub(channel).AddDocuments(iter([earlier]), timeout=60)
    assert run("drop", path, "--tenant", "old", "--json").said == {"removed": 1}


@pytest.mark.parametrize("arguments", [("list", "--tenant=a\udcff"), ("drop", "x", "--tenant=a\udcff")])
def test_a_name_that_is_not_utf_8_is_wrong_usage(run: Run, arguments: tuple[str, ...]) -> None:
    done = run(*arguments, "--json")
    assert (done.status, done.err) == (2, "")
    assert done.said["error"]["message"] == "'a\\udcff' is not UTF-8; give names and texts in UTF-8"


def test_an_unreadable_source_ends_a_build_and_is_reported(run: Run, tmp_path: Path) -> None:
    done = run("build", "source", tmp_path / "nothing", "--public", "--json")
    assert (done.status, done.said["error"]["code"]) == (1, "INVALID_ARGUMENT")
    assert "neither a file nor a folder" in done.said["error"]["message"]
    assert run("list", "--json").said["corpora"] == [] or "source" not in run("list").out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("build", "source"), "nothing to read"),
        (("build", "source", "x"), "--tenant or --public"),
        (("build", "source", "x", "--tenant", "a", "--public"), "--tenant or --public"),
        (("unload", "source"), "--tenant or --public"),
        (("drop",), "names or --all"),
        (("drop", "x", "--all"), "names or --all"),
        (("forget",), "--session or --all"),
    ],
)
def test_wrong_usage_exits_with_two(arguments: tuple[str, ...], says: str, run: Run) -> None:
    done = run(*arguments)
    assert (done.status, done.out) == (2, "")
    assert says in done.err


def test_a_worker_that_does_not_answer_is_reported_in_one_line(run: Run) -> None:
    done = run("stats", address="127.0.0.1:1")
    assert (done.status, done.out, done.err.count("\n")) == (1, "", 1)


@pytest.mark.parametrize("address", ["foo", "http://127.0.0.1:1", "127.0.0.1:99999", ""])
def test_an_address_that_cannot_be_dialled_is_wrong_usage(address: str, run: Run) -> None:
    done = run("stats", address=address)
    assert (done.status, f"--address {address!r}" in done.err) == (2, True)


@pytest.mark.parametrize(
    "command", ["list", "stats", "build", "load", "unload", "add", "drop", "export", "forget"]
)
def test_help_has_examples(command: str, run: Run) -> None:
    done = run(command, "--help")
    assert done.status == 0
    assert f"outrider memory {command}" in done.out.partition("Example")[2]
