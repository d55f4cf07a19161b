"""The demonstration's corpus leaves out the text that the prompts come from, as training does."""

import json
import sysconfig
from pathlib import Path

import pytest

from outrider.cli.local.demo_corpus import built_of, installed_source, kept_out
from outrider.tokens import TokenTable
from retrieval_service.corpus.encoding import StoredDocuments
from retrieval_service.corpus.layout import read_header
from training.heldout import NAMES, near_copies

ROOT = Path(__file__).resolve().parents[2]
HELD = ROOT / "models" / "heldout.jsonl"
LIBRARY = Path(sysconfig.get_path("stdlib"))


@pytest.fixture(scope="module")
def tokens() -> TokenTable:
    return TokenTable.from_json((ROOT / "models" / "target" / "tokenizer.json").read_text())


def documents(folder: Path) -> dict[str, list[int]]:
    stored = StoredDocuments([(folder, read_header(folder))])
    return {str(number): ids.tolist() for number, ids in enumerate(stored)}


def test_held_out_modules_and_their_near_copies_are_left_out(tokens: TokenTable, tmp_path: Path) -> None:
    source = tmp_path / "packages"
    source.mkdir()
    (source / "own.py").write_text("\n".join(f"def own_{n}(left):\n    return left + {n}" for n in range(60)))
    for name in ("heapq.py", "shlex.py", "textwrap.py"):
        (source / f"vendored_{name}").write_text((LIBRARY / name).read_text().replace("import", "import  "))
    prompt = json.loads(HELD.read_text().splitlines()[0])
    (source / "pasted.py").write_text(f"x = 1\n{prompt['prompt']}{prompt['continuation']}\ny = 2\n")
    held = kept_out(HELD, tmp_path)
    folder = built_of(installed_source(tmp_path), tokens, held, tmp_path / "cache")
    texts = [tokens.encode(path.read_text()) for path in held]
    found = documents(folder)
    assert len(found) == 1, "only what is our own is left"
    assert not near_copies(found, texts)
    assert near_copies({"pasted": tokens.encode((source / "pasted.py").read_text())}, texts), "the rule bites"


def test_all_modules_that_training_holds_out_are_held_out_here(tmp_path: Path) -> None:
    held = {path for path in kept_out(HELD, tmp_path) if path.suffix == ".py"}
    assert held == {LIBRARY / name for name in NAMES if (LIBRARY / name).is_file()}


def test_a_corpus_is_built_once_and_anew_where_a_file_changed(tokens: TokenTable, tmp_path: Path) -> None:
    file, held = tmp_path / "a.py", tmp_path / "held.txt"
    file.write_text("value = 1\n" * 9)
    held.write_text("nothing of it")
    cache = tmp_path / "cache"
    first = built_of([file], tokens, [held], cache)
    before = (first / "header.json").stat().st_mtime_ns
    assert built_of([file], tokens, [held], cache) == first
    assert (first / "header.json").stat().st_mtime_ns == before
    file.write_text("value = 2\n" * 10)
    second = built_of([file], tokens, [held], cache)
    assert second != first
    assert not first.exists(), "one corpus at a time"


def test_the_smallest_packages_come_first_and_the_whole_is_bounded(tmp_path: Path) -> None:
    for name, size in (("big", 900), ("small", 100), ("tests", 10)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "module.py").write_text("#" * size)
    (tmp_path / "data.txt").write_text("no source")
    assert installed_source(tmp_path, 5000) == [tmp_path / n / "module.py" for n in ("small", "big")]
    assert installed_source(tmp_path, 950) == [tmp_path / "small" / "module.py"]
