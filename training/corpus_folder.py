"""Writes the embedded pair's training text to a folder, for `outrider distil` to make the embedded heads.

Run as `python -m training.corpus_folder --tokenizer FILE --held-out FILE --out DIR`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from training import corpus, prompts


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes every file to train on below --out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--tokenizer", type=Path, required=True, help="tokenizer.json that near-copies are found with"
    )
    parser.add_argument(
        "--held-out", type=Path, required=True, help="JSON lines with prompt and continuation"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the files; must not exist")
    options = parser.parse_args(arguments)
    files = corpus.stdlib()
    held = [text.prompt + text.continuation for text in prompts.read(options.held_out)]
    train, _ = corpus.training_files(Tokenizer.from_file(str(options.tokenizer)), files, held)
    options.out.mkdir(parents=True)
    for name in train:
        path = options.out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(files[name], encoding="utf-8")


if __name__ == "__main__":
    main()
