"""The stages of `outrider distil`: rows, features, training, acceptance, and the folder that is served.

Each stage leaves files in the work folder and goes on with those that it finds there, so that the same
command after an interruption, at whatever moment, ends in the same head.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from transformers import PreTrainedModel

from outrider.folder_lock import FolderLock
from outrider.lm.device.placement import find_device
from outrider.lm.heads.published import write_head
from outrider.lm.load.model import load_model, load_tokenizer
from outrider.lm.load.source import ModelSource
from outrider.lm.load.weights_digest import weights_digest
from outrider.tokens import TokenTable
from speculative.errors import InvalidRequest
from training.export import publish
from training.heads import untrained
from training.heads.acceptance import HeadAcceptance, HeldOutText, held_out_acceptance, held_out_texts
from training.heads.block_lm import BlockLM
from training.heads.boost import FirstDrafter
from training.heads.card import card
from training.heads.frozen import FrozenTarget
from training.heads.kinds import BLOCK, LM
from training.heads.lessons import Lessons, features_of, written_rows
from training.heads.look_ahead import TrainedLookAhead
from training.heads.recipe import DistilOptions, checked, epochs_of, measured_depth
from training.heads.rows import TrainingText, beginnings, fixed_rows, read_text, row_counts
from training.heads.small_lm import SmallLM, check_width, context_of
from training.heads.unrolled import TrainedHead
from training.loop import Run, Settings, TrainingProgress

_OUTER = ("embeddings", "lm_head.weight")
"""Names of embeddings and output layers that their sizes do not show to be such."""

_WEIGHTS_OF = "weights of "
"""Beginning of the name of a setting that is the digest of the weights of an option's folder."""


class DistilProgress(Protocol):
    """Shows the progress of a command."""

    def __call__(self, stage: str, done: int, total: int, remark: str = "") -> None:
        """Notes how much of a stage's total is done; `remark` is a figure to show with it."""


def distil(options: DistilOptions, documents: Iterable[str], progress: DistilProgress) -> dict[str, Any]:
    """Trains a head and writes its folder to `options.out`; returns what `--json` prints.

    Raises InvalidRequest if the options, the text or the files of an earlier run do not fit, FolderInUse if
    another run has the work folder, ModelRefused if the target cannot have a head, Interrupted on SIGTERM.
    """
    options = replace(checked(options), device=str(find_device(options.device)))
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    with closing(FolderLock(options.work)):  # two runs would write one file at once
        return _distil(options, documents, progress)


def _distil(options: DistilOptions, documents: Iterable[str], progress: DistilProgress) -> dict[str, Any]:
    """Does what `distil` says, in a work folder that is this run's."""
    target = FrozenTarget.load(options.target, options.device)
    table = _table(options.target)
    _check_contexts(options)
    for flag, other in (("--drafter", options.drafter), ("--boost-of", options.boost_of)):
        if other is not None and _table(other).digest != table.digest:
            raise InvalidRequest(f"{flag} {other!r} has another tokenizer than the target {options.target!r}")
        if other is not None and options.kind in (LM, BLOCK):
            check_width(flag, other, target)
    text = read_text(table, target.eos, documents, options.past, options.held_out, options.window)
    _check_prompts(options, text)
    same_settings(
        options.work / "data.json",
        {"target": weights_digest(options.target), "text": text.digest, **options.data_settings()}
        | _weights_of("drafter", options.drafter),
    )
    lessons, sizes = _lessons(options, target, text, progress)
    steps = options.steps or epochs_of(options.kind) * lessons.steps_per_epoch
    options = replace(options, steps=steps)
    kind_settings = options.kind_settings() | _weights_of("boost_of", options.boost_of)
    same_settings(options.work / f"{options.kind}.json", kind_settings)
    held = held_out_texts(
        target,
        text.prompts,
        options.held_tokens,
        options.work / "held.npz",
        _stage(progress, "held-out text"),
    )
    head = new_head(options, target, lessons)
    before = _before(options, head, target, held)
    first = None if options.boost_of is None else FirstDrafter.load(options.boost_of, target, options.boost)
    run = train(options, head, target, lessons, held, progress, first)
    after = held_out_acceptance(head, target, held, measured_depth(options))
    result: dict[str, Any] = {
        "kind": options.kind,
        "out": str(options.out),
        "parameters": sum(parameter.numel() for parameter in head.parameters()),
        "steps": run.progress.step,
        "training_seconds": round(run.progress.spent, 1),
        **sizes,
        "held_out_prompts": len(text.prompts),
        "depth": measured_depth(options),
        "acceptance": {
            name: {"before": before[name], "after": found.as_object()} for name, found in after.items()
        },
    }
    if first is not None:
        result["boost"] = _union(head, first, target, held, measured_depth(options))
    return _publish(options, head, text, result)


def _check_contexts(options: DistilOptions) -> None:
    """Raises InvalidRequest where a model cannot read a whole row."""
    models = {"--target": options.target, "--drafter": options.drafter, "--boost-of": options.boost_of}
    for flag, model in models.items():
        if model is not None and options.window > (most := context_of(model)):
            raise InvalidRequest(
                f"--window {options.window} is more than the {most} tokens that {flag} {model!r} can read; "
                "lower it"
            )


def _check_prompts(options: DistilOptions, text: TrainingText) -> None:
    """Raises InvalidRequest for a held-out prompt that the target cannot read and continue."""
    most, longest = context_of(options.target), max(map(len, text.prompts))
    if longest + options.held_tokens > most:
        raise InvalidRequest(
            f"a held-out prompt has {longest} tokens, and the target writes {options.held_tokens} behind it; "
            f"it can read {most}: shorten the prompt"
        )


def _weights_of(name: str, source: str | None) -> dict[str, Any]:
    """The digest of a folder's weights as a setting: the folder may hold others than it did."""
    if source is None or not (model := ModelSource.of(source)).is_folder:
        return {}
    return {f"{_WEIGHTS_OF}{name}": weights_digest(model.name)}


def same_settings(path: Path, settings: dict[str, Any]) -> None:
    """Keeps settings in a file of the work folder. Raises InvalidRequest if the file has other settings.

    A setting that the file lacks is added: an earlier version, which wrote the file, did not know it.
    """
    found: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        found = json.loads(path.read_text())
    different = [
        _difference(name, found[name], value)
        for name, value in settings.items()
        if name in found and found[name] != value
    ]
    if different:
        raise InvalidRequest(
            f"{path.parent} holds an earlier run, and {', '.join(different)}: give another --work, or "
            "delete that folder"
        )
    if settings.keys() - found.keys():
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(found | settings))
        os.replace(partial, path)


def _difference(name: str, was: object, now: object) -> str:
    """What the user of the command changed, in the command's words."""
    flag = f"--{name.removeprefix(_WEIGHTS_OF).replace('_', '-')}"
    if name.startswith(_WEIGHTS_OF):
        return f"the weights of {flag} have changed since this run began"
    if name == "target":
        return "the weights of --target have changed since"
    if name == "text":
        return "the text has changed since"
    return f"{flag} was {was} and is now {now}"


def new_head(options: DistilOptions, target: FrozenTarget, lessons: Lessons) -> TrainedHead:
    """An untrained head, the same for the same seed and text."""
    torch.manual_seed(options.seed)
    match options.kind:
        case "lm" | "block":
            assert options.drafter is not None, "the options are checked"
            if options.kind == BLOCK:
                return BlockLM.widened(options.drafter, target, options.depth - 1)
            return SmallLM.load(options.drafter, target)
        case "pass":
            return TrainedLookAhead(target, options.depth)
        case "medusa":
            return untrained.medusa(target, options.depth)
        case "blockwise":
            return untrained.blockwise(target, options.depth)
        case "hydra":
            return untrained.hydra(target, options.depth)
        case "eagle3":
            return untrained.eagle3(target, lessons.frequent(options.draft_vocabulary))
        case "mtp":
            return untrained.mtp(target)
    return untrained.eagle(target)


def train(
    options: DistilOptions,
    head: TrainedHead,
    target: FrozenTarget,
    lessons: Lessons,
    held: list[HeldOutText],
    progress: DistilProgress,
    first: FirstDrafter | None = None,
) -> Run:
    """Trains a head from its last checkpoint, if there is one, to its last step; or a second one of two."""
    loss, rate = options.loss, options.rate

    def loss_of(step: int, _share: float) -> torch.Tensor:
        torch.manual_seed(options.seed + step)  # a model's dropout, after an interruption too
        ids, features, read = lessons.at(step).to(target.device)
        weights = None if first is None else first.weights(target, ids, features)
        return loss.of_batch(head, target, ids, features, options.seed + step, weights, read)

    def evaluate() -> float:
        found = held_out_acceptance(head, target, held, measured_depth(options))
        return -found["greedy"].length

    def after_step(done: TrainingProgress, value: float) -> None:
        progress("training", done.step, options.steps, f"loss {value:.3f}")

    known = target.parts.shape.vocabulary_size
    ids = {known, known + options.depth - 1}  # the second of a block drafter, which has masks as well
    settings = Settings(
        budget=0.0,
        rate=rate,
        steps=options.steps,
        evaluate_every=20 * options.save_every,
        save_every=options.save_every,
    )
    run = Run(
        options.kind,
        head,
        settings,
        options.work,
        is_outer=lambda name, matrix: name in _OUTER or not ids.isdisjoint(matrix.shape),
        after_step=after_step,
    )
    run.train(loss_of, evaluate)
    return run


def _lessons(
    options: DistilOptions, target: FrozenTarget, text: TrainingText, progress: DistilProgress
) -> tuple[Lessons, dict[str, int]]:
    window, seed, rows = options.window, options.seed, options.tokens // options.window
    counts = row_counts(options.data, options.written, rows, options.drafter is not None)
    fixed = fixed_rows(text, counts.fixed, window, seed)
    starts = beginnings(text, counts.target, window, seed + 1)
    shown = _stage(progress, "target's text")
    written = written_rows(target.model, starts, window, options.work, "written", shown)
    drafted = written[:0]
    if options.drafter is not None and counts.drafter:
        starts = beginnings(text, counts.drafter, window, seed + 2)
        shown = _stage(progress, "drafter's text")
        drafted = written_rows(
            _drafter(options.drafter, options.device), starts, window, options.work, "drafted", shown
        )
    ids = np.concatenate([fixed, written, drafted])
    reads = untrained.reads_of(options.kind, target)
    features, read = features_of(target, ids, reads, options.work, _stage(progress, "features"))
    lessons = Lessons(ids, features, options.batch // options.window, options.seed, read)
    sizes = {"fixed_tokens": fixed.size, "written_tokens": written.size, "drafted_tokens": drafted.size}
    return lessons, sizes


def _drafter(source: str, device: str) -> PreTrainedModel:
    """The model that writes rows in the drafter's place, as `--drafter` names it."""
    model = load_model(source, device=device, dtype="auto")
    model.set_attn_implementation("sdpa")
    return model


def _before(
    options: DistilOptions, head: TrainedHead, target: FrozenTarget, held: list[HeldOutText]
) -> dict[str, dict[str, object]]:
    """Acceptance of the untrained head; a resumed run reads it from the work folder."""
    path = options.work / f"{options.kind}-before.json"
    with suppress(OSError, ValueError):
        known: dict[str, dict[str, object]] = json.loads(path.read_text())
        return known
    found: dict[str, HeadAcceptance] = held_out_acceptance(head, target, held, measured_depth(options))
    objects = {name: acceptance.as_object() for name, acceptance in found.items()}
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(objects))
    os.replace(partial, path)
    return objects


def _union(
    head: TrainedHead, first: FirstDrafter, target: FrozenTarget, held: list[HeldOutText], depth: int
) -> dict[str, dict[str, object]]:
    """Acceptance of the first drafter alone, and of both together."""
    alone = held_out_acceptance(first.model, target, held, depth)
    both = held_out_acceptance(head, target, held, depth, beside=first.model)
    return {name: {"first": alone[name].as_object(), "both": both[name].as_object()} for name in both}


def _publish(
    options: DistilOptions, head: TrainedHead, text: TrainingText, result: dict[str, Any]
) -> dict[str, Any]:
    """Writes the finished folder under another name, then moves it to its place at once."""
    staged = options.work / f"{options.kind}-head"
    shutil.rmtree(staged, ignore_errors=True)
    if isinstance(head, SmallLM):
        head.write(staged)
    else:
        write_head(head, staged)
    for file in staged.iterdir():
        file.chmod(0o644)
    result["bytes"] = sum(file.stat().st_size for file in staged.glob("*.safetensors"))
    (staged / "README.md").write_text(card(options, text, result), encoding="utf-8")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    publish(staged, options.out)
    return result


def _table(target: str) -> TokenTable:
    tokenizer = load_tokenizer(target)
    if tokenizer is None:
        raise InvalidRequest(f"model {target!r} has no tokenizer to encode the text; add its tokenizer.json")
    return TokenTable.from_json(tokenizer.json)


def _stage(progress: DistilProgress, name: str) -> Callable[[int, int], None]:
    return lambda done, total: progress(name, done, total)
