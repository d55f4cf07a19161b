"""Compares the tokenizers of two models before either model is loaded: reads tokenizer files, no weights."""

from pathlib import Path

from outrider.pair.tokenizers import fit
from outrider.tokens import TokenTable, split_revision

_FILE = "tokenizer.json"


def tokenizer_difference(target: str, drafter: str) -> str:
    """The first difference between the tokenizers of two models, in words; empty where there is none.

    Two equal files settle it quickly. Otherwise transformers reads both tokenizers as the services do, since
    further files may add tokens. Where a tokenizer cannot be read, the answer is empty too: the service that
    loads the model says why. Blocks; a Hugging Face id may be looked up on the network.

    Args:
        target: the target's folder, ORG/NAME or ORG/NAME@REVISION.
        drafter: the drafter, in the same form.
    """
    tables = [_from_file(model) for model in (target, drafter)]
    if all(tables) and fit(*tables).ok:
        return ""
    tables = [_as_loaded(model) for model in (target, drafter)]
    return fit(*tables).difference if all(tables) else ""


def _from_file(model: str) -> TokenTable | None:
    """The tokenizer in a model's tokenizer.json; None where there is no such file that can be read."""
    path = Path(model).expanduser() / _FILE
    try:
        if not path.parent.is_dir():
            from huggingface_hub import hf_hub_download

            name, revision = split_revision(model)
            path = Path(hf_hub_download(name, _FILE, revision=revision))
        return TokenTable.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, ImportError):
        return None


def _as_loaded(model: str) -> TokenTable | None:
    """The tokenizer as a service loads it beside the model; None where a service would find none."""
    try:
        from outrider.lm.load.model import load_tokenizer
        from speculative.errors import InvalidRequest
    except ImportError:
        return None
    try:
        loaded = load_tokenizer(model)
    except InvalidRequest:
        return None
    return None if loaded is None else TokenTable.from_json(loaded.json)
