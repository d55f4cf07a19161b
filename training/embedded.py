"""python -m training.embedded --out DIR: makes the embedded pair, from source text to two model folders.

A run that was stopped at any moment (by SIGTERM too) continues from its checkpoints in the work directory
when the same command runs again. Budgets are minutes of processor time on one thread, so a paused process
spends none.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from training import continued, corpus, distil, export, model, prompts, target, tokenizer
from training.batches import scattered
from training.loop import Interrupted, Run, Settings
from training.recipe import PRESETS, Recipe

COMMITTED = Path(__file__).parent.parent / "models" / "heldout.jsonl"

# Parameters of glibc's mallopt.
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
_KEPT_BYTES = 1 << 30


@dataclass(frozen=True)
class Job:
    """A pair to train: its recipe, the folder of checkpoints, the tokenizer and the training text."""

    recipe: Recipe
    work: Path
    tokenizer: Tokenizer
    data: corpus.Corpus


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains tokenizer, target and drafter, and writes target/, drafter/ and heldout.jsonl to --out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the finished pair")
    parser.add_argument("--work", type=Path, default=Path("build/training"), help="checkpoints and log")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="embedded")
    parser.add_argument("--minutes-target", type=float, default=85.0)
    parser.add_argument("--minutes-drafter", type=float, default=57.0)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    keep_freed_memory()
    try:
        make(options)
    except Interrupted as interrupted:
        sys.exit(f"interrupted while training the {interrupted}; run the same command to go on")


def keep_freed_memory() -> None:
    """Lets glibc reuse large freed blocks instead of returning them; does nothing under another libc.

    Otherwise training spends a good part of its time on page faults.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _KEPT_BYTES)
        mallopt(_TRIM_THRESHOLD, 2 * _KEPT_BYTES - 1)


def make(options: argparse.Namespace) -> None:
    """Runs every stage in order; stages whose checkpoints say that they are finished are skipped."""
    options.work.mkdir(parents=True, exist_ok=True)
    options.out.mkdir(parents=True, exist_ok=True)
    files = _files(PRESETS[options.preset])
    job = prepare(PRESETS[options.preset], options.work, files)
    train_target(job, options.minutes_target)
    train_drafter(job, options.minutes_drafter)
    for name in ("target", "drafter"):
        export.publish(options.work / name, options.out / name)
    prompts.write(corpus.split(files)[1], job.tokenizer, options.out / "heldout.jsonl")


def prepare(recipe: Recipe, work: Path, files: dict[str, str]) -> Job:
    """Trains the tokenizer unless `work` has one, and packs the corpus."""
    path = work / "tokenizer.json"
    if not path.exists():
        tokenizer.train(corpus.split(files)[0].values(), recipe.vocabulary).save(str(path))
    bpe = tokenizer.load(path)
    committed = prompts.read(COMMITTED) if COMMITTED.exists() else []
    texts = [text.prompt + text.continuation for text in committed]
    return Job(recipe, work, bpe, corpus.build(bpe, files, texts))


def train_target(job: Job, minutes: float) -> None:
    """Trains the target and writes its folder to the work directory."""
    recipe = job.recipe
    made = model.build(recipe.target, recipe.eos, seed=0)
    # With products in bfloat16, plain attention is faster than the fused kernel at these windows.
    made.set_attn_implementation("eager")
    run = Run(
        "target",
        made,
        Settings(60 * minutes, recipe.target_rate, evaluate_every=recipe.evaluate_every),
        job.work,
    )
    run.train(target.loss_of(made, job.data.train, recipe.window, recipe.batch), _held_out(job, made))
    export.write(made, job.tokenizer, job.work / "target")


def train_drafter(job: Job, minutes: float) -> None:
    """Distils the drafter from the target in the work directory and writes its folder there."""
    recipe = job.recipe
    teacher = LlamaForCausalLM.from_pretrained(job.work / "target", dtype=torch.float32)
    teacher.requires_grad_(False)
    own = continuations(job, teacher)
    # Over whole windows bfloat16 and plain attention are faster; token by token, float32 and the fused one.
    teacher.bfloat16().set_attn_implementation("eager")
    made = model.build(recipe.drafter, recipe.eos, seed=0)
    made.set_attn_implementation("eager")
    run = Run(
        "drafter",
        made,
        Settings(60 * minutes, recipe.drafter_rate, evaluate_every=recipe.evaluate_every),
        job.work,
    )
    window = own.shape[1]
    source = scattered(job.data.train, recipe.source_rows, window, seed=3)
    short = distil.Taught(teacher, np.concatenate([own, source]), recipe.batch // window, seed=4)
    late = scattered(job.data.train, recipe.long_rows, 4 * window, seed=3)
    long = distil.Taught(teacher, late, max(1, recipe.batch // (4 * window)), seed=5)
    run.train(distil.loss_of(made, short, long), _held_out(job, made))
    export.write(made, job.tokenizer, job.work / "drafter")


def continuations(job: Job, teacher: LlamaForCausalLM) -> npt.NDArray[np.uint16]:
    """Windows of a quarter source text and three quarters of the target's own: uint16, (rows, window)."""
    recipe, window = job.recipe, 2 * job.recipe.window
    prompts = scattered(job.data.train, recipe.continued_rows, window // 4, seed=2)
    parts = np.split(prompts, range(recipe.chunk, len(prompts), recipe.chunk))
    paths = [job.work / f"continued-{number}.npy" for number in range(len(parts))]
    return np.concatenate(
        [continued.kept(teacher, part, window, path) for part, path in zip(parts, paths, strict=True)]
    )


def _files(recipe: Recipe) -> dict[str, str]:
    return {name: text for name, text in corpus.stdlib().items() if name.startswith(recipe.only or "")}


def _held_out(job: Job, made: LlamaForCausalLM) -> Callable[[], float]:
    window = 2 * job.recipe.window
    return lambda: target.held_out_loss(made, job.data.held, window, job.recipe.held_windows)


if __name__ == "__main__":
    main()
