"""`outrider index` builds, describes, verifies, merges and removes corpora."""

import io
import sys
from pathlib import Path

import pytest

from tests.cli.inside import Ended, Run, ended

ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = str(ROOT / "models/target")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: str | Path) -> Ended:
        return ended(capsys, "index", *arguments)

    return run


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.py").write_text(f"def function_{number}(value):\n    return value\n" * 20)
    (folder / "rubbish.bin").write_bytes(bytes(range(256)))
    return folder


@pytest.fixture
def corpus(run: Run, texts: Path, tmp_path: Path) -> Path:
    assert run("build", tmp_path / "corpus", texts, "--tokenizer", TOKENIZER).status == 0
    return tmp_path / "corpus"


def test_a_corpus_is_built_and_described(run: Run, texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "corpus"
    built = run("build", out, texts, "--tokenizer", TOKENIZER, "--tenant", "acme", "--json").said
    assert built["documents"] == 3
    assert built["left_out"] == {"binary files": 1}
    said = run("info", out, "--json").said
    assert said["complete"] is True
    assert {key: built[key] for key in said if key != "complete"} == {
        key: value for key, value in said.items() if key != "complete"
    }
    assert (said["tenant"], said["generation"], said["vocabulary_size"]) == ("acme", 1, 4096)
    assert said["bytes"] < 9 * said["tokens"]
    in_words = run("info", out)
    assert "tenant acme's" in in_words.out
    assert f"{said['tokens']:,} tokens of 3 documents" in in_words.out


def test_only_files_that_fit_a_glob_are_read(run: Run, texts: Path, tmp_path: Path) -> None:
    options = ("--tokenizer", TOKENIZER, "--glob", "0.*", "--glob", "*.bin", "--public", "--json")
    said = run("build", tmp_path / "corpus", texts, *options).said
    assert (said["documents"], said["tenant"]) == (1, None)


def test_an_empty_corpus_is_called_empty(run: Run, texts: Path, tmp_path: Path) -> None:
    said = run("build", tmp_path / "corpus", texts, "--tokenizer", TOKENIZER, "--glob", "*.none", "--public")
    assert "0 tokens of 0 documents" in said.out
    assert "the corpus is empty: no document was found; look at the paths and at --glob" in said.out


def test_json_lines_are_read_from_standard_input(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = b'{"body": "one two"}\n{"body": "three"}\nnonsense\n'
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines)))
    options = ("--tokenizer", TOKENIZER, "--stdin", "--jsonl-field", "body", "--json")
    said = run("build", tmp_path / "corpus", *options).said
    assert said["documents"] == 2
    assert said["left_out"] == {"lines without text": 1}


def test_near_copies_are_left_out(run: Run, texts: Path, tmp_path: Path) -> None:
    options = ("--tokenizer", TOKENIZER, "--exclude", texts / "1.py", "--json")
    said = run("build", tmp_path / "corpus", texts, *options).said
    assert said["left_out"] == {"near-copies": 1, "binary files": 1}


def test_verifying_names_the_file_that_is_damaged(run: Run, corpus: Path) -> None:
    assert "as written" in run("verify", corpus).out
    path = corpus / "000001-00000.suffixes"
    path.write_bytes(path.read_bytes()[::-1])
    done = run("verify", corpus)
    assert (done.status, done.out) == (1, "")
    assert done.err.startswith(f"error: {path}: damaged")
    assert done.err.count("\n") == 1
    assert run("verify", corpus, "--json").said["error"]["code"] == "DATA_LOSS"


def test_corpora_are_merged_and_removed(run: Run, corpus: Path, tmp_path: Path) -> None:
    merged = run("merge", tmp_path / "both", corpus, corpus, "--shard-tokens", "500", "--json").said
    assert merged["documents"] >= 6
    assert merged["shards"] > 1
    assert run("rm", tmp_path / "both", "--json").said == {"removed": str(tmp_path / "both")}
    assert not (tmp_path / "both").exists()
    assert run("rm", tmp_path / "both", "--json").said["error"]["code"] == "NOT_FOUND"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("build", "out", "in"), "--tokenizer"),
        (("build", "out", "--tokenizer", TOKENIZER), "--stdin"),
        (
            ("build", "out", "in", "--tokenizer", TOKENIZER, "--tenant", "a", "--public"),
            "--tenant or --public",
        ),
        (("build", "out", "in", "--tokenizer", TOKENIZER, "--shard-tokens", "1"), "--shard-tokens"),
        (("merge", "out"), "parts"),
        (("nonsense",), "nonsense"),
    ],
)
def test_wrong_usage_exits_with_two(arguments: tuple[str, ...], says: str, run: Run) -> None:
    done = run(*arguments)
    assert (done.status, done.out) == (2, "")
    assert says in done.err
    assert run(*arguments, "--json").said["error"]["code"] == "INVALID_ARGUMENT"


@pytest.mark.parametrize("command", ["info", "verify", "rm"])
def test_a_missing_corpus_is_reported_in_one_line(command: str, run: Run, tmp_path: Path) -> None:
    done = run(command, tmp_path / "nothing")
    assert done == (1, "", f"error: {tmp_path / 'nothing'}: no corpus there\n")


@pytest.mark.parametrize("command", ["info", "verify", "rm"])
def test_a_file_in_place_of_a_corpus_is_refused(command: str, run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    assert run(command, tmp_path / "file") == (1, "", f"error: {tmp_path / 'file'}: no corpus there\n")


def test_a_missing_source_file_is_reported_in_one_line(run: Run, tmp_path: Path) -> None:
    done = run("build", tmp_path / "out", tmp_path / "nothing", "--tokenizer", TOKENIZER)
    assert done.status == 1
    assert done.err == f"error: {tmp_path / 'nothing'}: neither a file nor a folder\n"


@pytest.mark.parametrize("command", ["build", "info", "verify", "merge", "rm"])
def test_help_has_examples(command: str, run: Run) -> None:
    done = run(command, "--help")
    assert done.status == 0
    assert f"outrider index {command}" in done.out.partition("Example")[2]


def test_a_corpus_of_other_documents_is_replaced_only_on_request(
    run: Run, texts: Path, corpus: Path, tmp_path: Path
) -> None:
    build = ("--tokenizer", TOKENIZER)
    other = tmp_path / "other"
    other.mkdir()
    (other / "a.py").write_text("x = 1\n" * 50)
    before = run("info", corpus, "--json").said
    refused = run("build", corpus, other, *build, "--json")
    assert refused.status == 1
    assert refused.said["error"]["code"] == "ALREADY_EXISTS"
    assert f"holds a corpus of {before['tokens']:,} tokens in 3" in refused.said["error"]["message"]
    assert "say --replace" in refused.said["error"]["message"]
    refused = run("build", corpus, texts, *build, "--tenant", "acme", "--json")
    assert "documents of everybody" in refused.said["error"]["message"]
    assert run("info", corpus, "--json").said == before
    assert run("verify", corpus).status == 0
    (texts / "3.py").write_text("def more():\n    pass\n")
    assert run("build", corpus, texts, *build, "--json").said["documents"] == 4, "the same sources, read anew"
    assert run("build", corpus, other, *build, "--replace", "--json").said["documents"] == 1


def test_standard_input_replaces_no_corpus_unasked(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(text: bytes, *flags: str) -> Ended:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
        return run("build", tmp_path / "corpus", "--stdin", "--tokenizer", TOKENIZER, "--json", *flags)

    assert build(b"def one(): pass\n").status == 0
    assert build(b"def two(): pass\n").said["error"]["code"] == "ALREADY_EXISTS"
    assert build(b"def two(): pass\n", "--replace").said["generation"] == 2


def test_merging_into_a_part_needs_no_word_and_into_another_corpus_does(
    run: Run, corpus: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    source = tmp_path / "a.py"
    source.write_text("x = 1\n" * 50)
    assert run("build", other, source, "--tokenizer", TOKENIZER).status == 0
    assert run("merge", corpus, corpus, other, "--json").said["documents"] == 4
    assert run("merge", other, corpus, "--json").said["error"]["code"] == "ALREADY_EXISTS"
    assert run("merge", other, corpus, "--replace", "--json").said["documents"] == 4
