"""The demonstration's corpus: Python source of the packages that are installed here, built on first use.

The held-out modules, which the prompts come from, and their near-copies are left out, as in training: the
corpus must not hold the text that it is to draft. The user's cache folder keeps one corpus at a time.
"""

import hashlib
import json
import shutil
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from outrider.json_lines import json_lines
from outrider.runtime.settings import cache_folder
from outrider.tokens import TokenTable
from retrieval_service.corpus.build import build
from retrieval_service.corpus.encoding import TokenizedText
from retrieval_service.corpus.errors import CorpusError
from retrieval_service.corpus.layout import read_header
from retrieval_service.corpus.plan import CorpusSettings
from retrieval_service.corpus.texts import TextSource

MOST_BYTES = 8 << 20
"""Largest size of the source in bytes: some two and a half million tokens, read and sorted in seconds."""
LARGEST_FILE = 256 << 10
"""Largest size of a module in bytes; larger ones are tables rather than code."""
_LEFT_OUT = {"test", "tests", "_vendor", "__pycache__"}


def demo_corpus(tokens: TokenTable, heldout: Path, cache: Path | None = None) -> Path:
    """Folder of the corpus, built if necessary. Raises CorpusError or OSError where it cannot be built."""
    files = installed_source(Path(sysconfig.get_path("purelib")))
    folder = cache_folder() if cache is None else cache
    folder.mkdir(parents=True, exist_ok=True)
    return built_of(files, tokens, kept_out(heldout, folder), folder)


def built_of(files: Sequence[Path], tokens: TokenTable, held: Sequence[Path], cache: Path) -> Path:
    """Folder of a corpus of these files without near-copies of `held`; an unchanged corpus is kept."""
    listed = [(str(file), file.stat().st_size) for file in (*files, *held)]
    key = hashlib.sha256(json.dumps([tokens.digest, listed]).encode()).hexdigest()[:16]
    folder = cache / f"source-{key}"
    try:
        if read_header(folder).tokenizer == tokens.digest:
            return folder
    except CorpusError:
        pass
    for other in cache.glob("source-*"):
        shutil.rmtree(other, ignore_errors=True)
    text = TokenizedText(TextSource(tuple(files)), tokens, TextSource(tuple(held)))
    build(folder, CorpusSettings(tokens.digest, tokens.size, None), text)
    return folder


def installed_source(root: Path, most_bytes: int = MOST_BYTES) -> list[Path]:
    """Modules below `root`, the smallest packages first, so that the corpus covers many packages."""
    packages = [_modules(path) for path in sorted(root.iterdir()) if path.name not in _LEFT_OUT]
    sizes = [sum(path.stat().st_size for path in modules) for modules in packages]
    chosen: list[Path] = []
    room = most_bytes
    for _, modules in sorted(zip(sizes, packages, strict=True), key=lambda one: one[0]):
        for path in modules:
            length = path.stat().st_size
            if length <= room:
                room -= length
                chosen.append(path)
    return chosen


def kept_out(heldout: Path, cache: Path) -> list[Path]:
    """Files of held-out text: the prompts with their continuations, and their modules as installed here."""
    library = Path(sysconfig.get_path("stdlib"))
    held = [json.loads(line) for line in json_lines(heldout.read_text(encoding="utf-8"))]
    texts = cache / "held-out.txt"
    texts.write_text("\n\n".join(one["prompt"] + one["continuation"] for one in held), encoding="utf-8")
    return [texts, *(path for one in held if (path := library / one["name"]).is_file())]


def _modules(path: Path) -> list[Path]:
    if path.is_symlink() or path.name in _LEFT_OUT or path.name.startswith("."):
        return []
    if path.is_dir():
        return [module for inner in sorted(path.iterdir()) for module in _modules(inner)]
    return [path] if path.suffix == ".py" and 0 < path.stat().st_size <= LARGEST_FILE else []
