"""Finds models that may draft for a target, and takes the first that can: what `--drafter auto` does.

The table of families comes first, then models beside the target's folder and in the cache of this machine.
Reads configurations and tokenizers, no weights; those of the table's models are downloaded.
"""

from collections.abc import Iterator
from pathlib import Path

from outrider.hub.cached import CachedModel, all_cached, cached, whole_model
from outrider.hub.finding import FoundModel, find_model, read_config
from outrider.lm.load.quantised import check_readable, method_of
from outrider.pair.beforehand import tokenizer_difference
from outrider.pair.drafter_choice import (
    DrafterChoice,
    cached_siblings,
    choose_drafter,
    listed_siblings,
)
from outrider.tokens import TokenTable
from speculative.errors import OutriderError

_TOKENIZER = "tokenizer.json"


def suggest_drafter(target: FoundModel) -> DrafterChoice:
    """The drafter that this machine has, or can download, for a target; if there is none, lookup alone.

    Blocks; asks the hub for the table's models. A candidate that fails is passed over without an error.
    """
    if not (target.folder / _TOKENIZER).is_file():
        return DrafterChoice("", f"{target.text} has no {_TOKENIZER} to compare: lookup drafts alone")
    listed = listed_siblings(target.text)
    known = {target.text, *(model.name for model in listed)}
    tokens = _tokens(target.folder)
    here = [
        (model.name, model.size)
        for model in _on_this_machine(target)
        # Compare only the files: loading every tokenizer of a full cache would take minutes.
        if model.name not in known and tokens is not None and _tokens(model.folder) == tokens
    ]
    return choose_drafter(
        [*(model for model in listed if model.name != target.text), *cached_siblings(here, target.size)],
        lambda name: _refusal(target, name),
    )


def _refusal(target: FoundModel, name: str) -> str:
    """Reason why a model cannot draft for the target; empty if the model can."""
    try:
        own = cached(name) if not Path(name).is_absolute() else None
        folder = own.folder if own else find_model(name).folder
        check_readable(name, method_of(read_config(folder)))
    except OutriderError as error:
        return str(error)
    if not (folder / _TOKENIZER).is_file():
        return f"it has no {_TOKENIZER} to compare"
    difference = tokenizer_difference(str(target.folder), str(folder))
    return f"its tokenizer differs: {difference}" if difference else ""


def _on_this_machine(target: FoundModel) -> Iterator[CachedModel]:
    """Models in folders beside the target's folder, and models of the cache."""
    folder = Path(target.text).expanduser()
    if folder.is_dir():
        for other in sorted(folder.resolve().parent.iterdir()):
            if other.is_dir() and other != folder.resolve() and (model := whole_model(str(other), other)):
                yield model
    yield from all_cached()


def _tokens(folder: Path) -> str | None:
    """Digest of a model's tokenizer; None where a folder has no tokenizer that can be read."""
    try:
        return TokenTable.from_json((folder / _TOKENIZER).read_text(encoding="utf-8")).digest
    except (OSError, ValueError):
        return None
