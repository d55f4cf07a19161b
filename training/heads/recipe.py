"""The options of `outrider distil`, with defaults by kind of head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from math import inf
from pathlib import Path
from typing import Any

from outrider.lm.load.source import ModelSource
from speculative.errors import InvalidRequest
from training.heads.kinds import (
    BLOCK,
    BLOCKWISE,
    EAGLE,
    EAGLE3,
    HYDRA,
    KINDS,
    LM,
    MEDUSA,
    MODELS,
    MTP,
    ON_ONE_STATE,
    PASS,
)
from training.heads.loss import LOSSES, HeadLoss
from training.heads.rows import DATA, DRAFTER, MIXED

_CARD_MARK = "\noutrider distil "
"""Text of every model card of the command: its command line."""
_HEAD_FILES = (
    *("README.md", "config.json", "generation_config.json", "added_tokens.json", "special_tokens_map.json"),
    *("model*.safetensors", "model.safetensors.index.json", "*_lm_head.safetensors"),
    *("tokenizer*.json", "tokenizer.model", "chat_template.jinja", "vocab.json", "vocab.txt", "merges.txt"),
    *("spiece.model", "sentencepiece.bpe.model"),
)
"""Patterns of the names of a head's files, and of a small model's."""


@dataclass(frozen=True)
class DistilOptions:
    """A head to train. Paths are as the user wrote them; sizes are in tokens."""

    kind: str
    target: str
    out: Path
    work: Path
    """Folder of checkpoints, continuations and features; several kinds may share it."""
    text: tuple[Path, ...] = ()
    past: tuple[Path, ...] = ()
    globs: tuple[str, ...] = ()
    held_out: Path | None = None
    data: str = MIXED
    written: float = 0.5
    """With mixed data: share of the rows that a model continues."""
    drafter: str | None = None
    """Folder or id of the model that continues rows of drafter-written data, and half of those of mixed; for
    the kinds `lm` and `block` also the model to begin with."""
    boost_of: str | None = None
    """Folder or id of a first drafter, whose errors the kind `lm` learns to mend."""
    boost: float = 0.2
    """With `boost_of`: weight of places that the first drafter has right; other places weigh 1."""
    divergence: str = "forward-kl"
    tokens: int = 1_000_000
    """Tokens of text to train on, without past outputs."""
    window: int = 512
    """Tokens of a row."""
    steps: int = 0
    """Steps to train; 0: enough steps to read every row `epochs` times."""
    batch: int = 3072
    """Tokens of a step."""
    depth: int = 0
    """Tokens ahead that the head learns: heads of one hidden state, simulated steps of a head of one layer,
    look-ahead tokens or a block's places; 0: the kind's default."""
    draft_vocabulary: int = 0
    """For the kind `eagle3`: number of ids that the head may draft, the most frequent ones of the text; 0:
    as many as make up 98 % of the text."""
    rate: float = 0.0
    """Peak learning rate; 0: the kind's default."""
    seed: int = 0
    device: str = "cpu"
    threads: int | None = None
    """Compute threads; None: torch's default."""
    held_tokens: int = 96
    """Tokens that the target writes behind each held-out prompt."""
    save_every: float = 30.0
    """Seconds of processor time between two checkpoints."""

    @property
    def loss(self) -> HeadLoss:
        """The loss of this kind."""
        if self.kind in ON_ONE_STATE:
            return HeadLoss(self.divergence, self.depth, 0.0, 1.0, noise=0.0, scored=0.5)
        if self.kind == LM:
            return HeadLoss(self.divergence, self.depth, 0.0, 1.0, noise=0.0, scored=1.0)
        if self.kind in (BLOCK, PASS):
            return HeadLoss(self.divergence, self.depth, 0.0, 1.0, noise=0.0, scored=0.125)
        if self.kind in (EAGLE3, MTP):
            return HeadLoss(self.divergence, self.depth, 0.0, 1.0, noise=0.0, scored=0.5)
        return HeadLoss(self.divergence, self.depth, 1.0, 1.0, noise=0.1, scored=0.5)

    def data_settings(self) -> dict[str, Any]:
        """Fields that determine the files that all kinds share in a work folder."""
        chosen = {"data", "written", "drafter", "tokens", "window", "seed", "held_tokens"}
        return {name: value for name, value in asdict(self).items() if name in chosen}

    def kind_settings(self) -> dict[str, Any]:
        """Fields that determine a checkpoint."""
        chosen = {"kind", "divergence", "steps", "batch", "depth", "rate", "boost_of", "boost"}
        if self.kind == EAGLE3:
            chosen.add("draft_vocabulary")
        return {name: value for name, value in asdict(self).items() if name in chosen}


@dataclass(frozen=True)
class _KindDefaults:
    depth: int
    rate: float
    epochs: int
    measured: int
    """Length of the chains of held-out acceptance."""


_DEFAULTS: Mapping[str, _KindDefaults] = {
    MEDUSA: _KindDefaults(depth=3, rate=2e-3, epochs=2, measured=3),
    BLOCKWISE: _KindDefaults(depth=3, rate=2e-3, epochs=2, measured=3),
    HYDRA: _KindDefaults(depth=3, rate=2e-3, epochs=2, measured=3),
    EAGLE: _KindDefaults(depth=3, rate=4e-3, epochs=4, measured=5),
    EAGLE3: _KindDefaults(depth=4, rate=4e-3, epochs=4, measured=5),
    MTP: _KindDefaults(depth=3, rate=4e-3, epochs=4, measured=5),
    PASS: _KindDefaults(depth=3, rate=5e-2, epochs=1, measured=3),
    LM: _KindDefaults(depth=1, rate=5e-4, epochs=2, measured=5),
    BLOCK: _KindDefaults(depth=6, rate=2e-3, epochs=2, measured=6),
}


def checked(options: DistilOptions) -> DistilOptions:
    """The options with the kind's defaults. Raises InvalidRequest, which names the wrong option."""
    for name, known in (("kind", KINDS), ("data", DATA), ("divergence", LOSSES)):
        if (given := getattr(options, name)) not in known:
            raise InvalidRequest(f"--{name} {given!r} is not one of {', '.join(known)}")
    if options.kind in MODELS and options.drafter is None:
        raise InvalidRequest(f"--kind {options.kind} needs --drafter, the model to begin with")
    if options.kind == BLOCK and options.depth == 1:
        raise InvalidRequest("--depth 1: a block of one token is no block; give 2 or more")
    if options.kind == LM and options.depth > 1:
        raise InvalidRequest(f"--depth {options.depth}: a model of kind lm learns one token ahead")
    if options.boost_of is not None and options.kind != LM:
        raise InvalidRequest(f"--boost-of trains a second small model: give --kind lm, not {options.kind}")
    if not 0 <= options.boost <= 1:
        raise InvalidRequest(f"--boost {options.boost} is not a weight from 0 to 1")
    if options.data == DRAFTER and options.drafter is None:
        raise InvalidRequest("--data drafter needs --drafter, the model that writes the text")
    if not options.text and not options.past:
        raise InvalidRequest("nothing to train on: give text files or folders, or --past FILE")
    least = {"window": 16, "tokens": options.window, "batch": options.window, "steps": 0, "depth": 0}
    for name, low in least.items():
        if (value := getattr(options, name)) < low:
            raise InvalidRequest(f"--{name} {value} is below {low}, the least possible")
    if options.draft_vocabulary and options.kind != EAGLE3:
        raise InvalidRequest(f"--draft-vocabulary is for --kind eagle3, not {options.kind}; leave it out")
    if options.draft_vocabulary < 0:
        raise InvalidRequest(
            f"--draft-vocabulary {options.draft_vocabulary} is no number of tokens; give 1 or more"
        )
    if not 0 <= options.written <= 1:
        raise InvalidRequest(f"--written {options.written} is not a share from 0 to 1")
    if not 0 <= options.seed < 2**63:
        raise InvalidRequest(f"--seed {options.seed} is not a whole number from 0 to {2**63 - 1}")
    if not 0 <= options.rate < inf:
        raise InvalidRequest(f"--rate {options.rate} is no learning rate; give one above 0, or leave it out")
    _check_out(options)
    defaults = _DEFAULTS[options.kind]
    depth = options.depth or defaults.depth
    if depth > options.window // 4:
        raise InvalidRequest(f"--depth {depth} is more than a quarter of --window {options.window}; lower it")
    filled = {**vars(options), "depth": depth, "rate": options.rate or defaults.rate}
    return DistilOptions(**filled)


def _check_out(options: DistilOptions) -> None:
    """Raises InvalidRequest for what a finished head cannot take the place of, before hours of training."""
    out = options.out
    if out.name in ("", ".."):
        raise InvalidRequest(f"--out {str(out)!r} cannot hold the head; name a new folder")
    if out.exists() and not out.is_dir():
        raise InvalidRequest(f"--out {str(out)!r} is a file; name a folder")
    models = {"--target": options.target, "--drafter": options.drafter, "--boost-of": options.boost_of}
    for flag, model in models.items():
        if model is not None and (source := ModelSource.of(model)).is_folder:
            _check_apart(out, Path(source.name), f"the folder of {flag} {model!r}")
    _check_apart(out, options.work, f"the work folder {str(options.work)!r} (--work)")
    if out.is_dir() and (kept := _first_not_distilled(out)):
        raise InvalidRequest(
            f"--out {str(out)!r} holds {kept!r}, which this command did not write, and a finished head "
            "replaces the whole folder; name a new folder"
        )


def _check_apart(out: Path, other: Path, name: str) -> None:
    here, there = out.resolve(), other.resolve()
    if here.is_relative_to(there) or there.is_relative_to(here):
        relation = "is" if here == there else "lies in" if here.is_relative_to(there) else "holds"
        raise InvalidRequest(
            f"--out {str(out)!r} {relation} {name}, and a finished head would replace the files there; name "
            "another folder"
        )


def _first_not_distilled(folder: Path) -> str | None:
    """The name of an entry that the command did not write; None: a head may replace the folder.

    Somebody else's model has files of the same names, but no card of the command.
    """
    names = sorted(path.name for path in folder.iterdir())
    others = [name for name in names if not any(fnmatchcase(name, pattern) for pattern in _HEAD_FILES)]
    if others or not names:
        return others[0] if others else None
    card = folder / "README.md"
    own = card.is_file() and _CARD_MARK in card.read_text(encoding="utf-8", errors="replace")
    return None if own else names[0]


def epochs_of(kind: str) -> int:
    """Number of times that training reads every row if no number of steps is given."""
    return _DEFAULTS[kind].epochs


def measured_depth(options: DistilOptions) -> int:
    """Length of the chains of held-out acceptance, in tokens."""
    drafts_depth = options.kind in (*ON_ONE_STATE, PASS, BLOCK)
    return options.depth if drafts_depth else _DEFAULTS[options.kind].measured
