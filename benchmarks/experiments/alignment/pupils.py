"""Small drafters cut out of the target and taught by it in seconds: what experiments on alignment compare.

A pupil begins as the target's embeddings, first layers and output, so that a short lesson already shows what
a loss or a kind of text is good for. The embedded drafter, which learned for an hour, is far better.
"""

import copy
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import LlamaForCausalLM

from outrider.lm.runner import PackedLM
from training import corpus, export, prompts, tokenizer
from training.batches import scattered, shuffled
from training.continued import continue_
from training.embedded import COMMITTED
from training.loop import optimisers
from training.target import logits_of

PACKAGES = ("asyncio/", "email/", "http/", "unittest/", "xml/")
"""Parts of the standard library that pupils learn from; held-out modules in them are left out."""
EPOCHS, WINDOW, START, BATCH, RATE = 5, 160, 48, 8, 6e-3
"""How often a lesson reads each window, a window's length, the source text that a written window begins with,
windows of a step, and the highest learning rate."""
WARM_UP = 5
"""Steps over which the learning rate rises; then it falls to nothing."""
REWRITE_EVERY = 20
"""Steps after which a pupil that learns from its own text writes anew."""
SOURCE, TARGET, OWN = "source", "written by the target", "written by the drafter"

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def forward_kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """KL(target || drafter) at each place, from logarithms of probabilities [..., V]."""
    return (p.exp() * (p - q)).sum(-1)


def reverse_kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """KL(drafter || target) at each place."""
    return (q.exp() * (q - p)).sum(-1)


def jensen_shannon(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Mean divergence of both from their mean at each place."""
    middle = torch.logaddexp(p, q) - float(np.log(2))
    return (forward_kl(p, middle) + forward_kl(q, middle)) / 2


def total_variation(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Half of the summed distance at each place: the chance that the ratio rule rejects."""
    return (p.exp() - q.exp()).abs().sum(-1) / 2


LOSSES: Mapping[str, Loss] = {
    "forward KL": forward_kl,
    "reverse KL": reverse_kl,
    "Jensen-Shannon": jensen_shannon,
    "total variation": total_variation,
}


def windows_of(steps: int) -> int:
    """Number of windows in a lesson of `steps` steps: a longer lesson has more, and reads each as often."""
    return steps * BATCH // EPOCHS


@dataclass(frozen=True)
class Lesson:
    """Windows to learn from, with what the target says at each place."""

    ids: NDArray[np.uint16]
    """Windows of token ids, uint16 [rows, WINDOW]."""
    logprobs: torch.Tensor
    """The target's, float16 [rows, WINDOW, V]."""


@dataclass
class School:
    """The target as a teacher, and the lessons that it gives.

    Args:
        target: folder of the target.
    """

    target: Path
    _lessons: dict[tuple[str, int], Lesson] = field(default_factory=dict)

    @cached_property
    def teacher(self) -> LlamaForCausalLM:
        """The target in float32, with weights that stay."""
        made: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(self.target, dtype=torch.float32)
        made.requires_grad_(False)
        made.eval()
        return made

    @cached_property
    def source(self) -> NDArray[np.uint16]:
        """Source text without held-out modules and their near-copies: uint16 [tokens]."""
        files = {name: text for name, text in corpus.stdlib().items() if name.startswith(PACKAGES)}
        held = [each.prompt + each.continuation for each in prompts.read(COMMITTED)]
        return corpus.build(tokenizer.load(self.target / "tokenizer.json"), files, held).train

    def lesson(self, kind: str, steps: int) -> Lesson:
        """Windows of source text, or of text that the target wrote behind it, for `steps` steps."""
        if (kind, steps) not in self._lessons:
            rows = windows_of(steps)
            if kind == SOURCE:
                ids = scattered(self.source, rows, WINDOW, seed=5)
            else:
                ids = continue_(self.teacher, scattered(self.source, rows, START, seed=6), WINDOW)
            self._lessons[kind, steps] = self.judged(ids)
        return self._lessons[kind, steps]

    @torch.inference_mode()
    def judged(self, ids: NDArray[np.uint16]) -> Lesson:
        """Windows of ids, with the target's distributions."""
        found = [
            logits_of(self.teacher, torch.from_numpy(part.astype(np.int64))).log_softmax(-1).half()
            for part in np.split(ids, range(BATCH, len(ids), BATCH))
        ]
        return Lesson(ids, torch.cat(found))

    def pupil(self, layers: int) -> LlamaForCausalLM:
        """The target's first layers between its embeddings and its output; all weights can learn."""
        made: LlamaForCausalLM = copy.deepcopy(self.teacher)
        made.model.layers = nn.ModuleList(list(made.model.layers)[:layers])
        made.config.num_hidden_layers = layers
        layer_types = getattr(made.config, "layer_types", None)
        if layer_types:
            made.config.layer_types = layer_types[:layers]
        return made.requires_grad_(True)

    def teach(
        self,
        pupil: LlamaForCausalLM,
        kind: str,
        steps: int,
        loss_of: Loss = forward_kl,
        weights: torch.Tensor | None = None,
    ) -> None:
        """Takes `steps` steps on the lesson of a kind.

        Args:
            weights: of each place, float32 [windows_of(steps), WINDOW]; None: all alike.
        """
        using = optimisers(pupil, RATE, lambda name, _: "embed" in name)
        lesson = self.lesson(SOURCE if kind == OWN else kind, steps)
        for step in range(steps):
            if kind == OWN and step and step % REWRITE_EVERY == 0:
                count = min(windows_of(steps), REWRITE_EVERY * BATCH)
                begun = scattered(self.source, count, START, seed=6 + step)
                lesson = self.judged(continue_(pupil.eval(), begun, WINDOW))
            for optimiser in using:
                for group in optimiser.param_groups:
                    group["lr"] = RATE * min(1.0, (step + 1) / WARM_UP) * (1.0 - step / steps)
            rows = shuffled(len(lesson.ids), BATCH, 7, step)
            drafted = logits_of(pupil.train(), torch.from_numpy(lesson.ids[rows].astype(np.int64)))
            loss = loss_of(lesson.logprobs[rows].float(), drafted.log_softmax(-1))
            if weights is not None:
                loss = loss * weights[rows]
            loss.mean().backward()
            nn.utils.clip_grad_norm_(pupil.parameters(), 1.0)
            for optimiser in using:
                optimiser.step()
                optimiser.zero_grad()
        pupil.eval()

    def as_drafter(self, pupil: LlamaForCausalLM) -> PackedLM:
        """The pupil as the drafter service would load it."""
        with tempfile.TemporaryDirectory(prefix="outrider-pupil-") as folder:
            export.write(pupil, tokenizer.load(self.target / "tokenizer.json"), Path(folder))
            return PackedLM.load(folder, check=False)


SCHOOLS: dict[Path, School] = {}


def school_of(target: Path) -> School:
    """The school of a target; its lessons are written once."""
    return SCHOOLS.setdefault(target, School(target))
