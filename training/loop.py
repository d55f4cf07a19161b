"""A training loop that can be stopped at any moment and resumed."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from speculative.errors import InvalidRequest

LossOf = Callable[[int, float], torch.Tensor]
"""Loss of a step's batch, given the step and the share of the budget spent (0 to 1)."""

PLATEAU_SECONDS = 1800.0
PLATEAU_GAIN = 0.01

WARMUP = 40
"""Steps over which the learning rate rises."""

DECAY_FROM = 0.45
"""Share of the budget after which the learning rate falls, linearly, to nearly nothing."""


@dataclass(frozen=True)
class Settings:
    """Settings of a run; times are seconds of processor time, so a paused process spends none.

    A run of a number of steps ends with the same weights however often it was interrupted. A run of a
    time does not.
    """

    budget: float
    """Time to train, in seconds, where `steps` is 0."""
    rate: float
    """Peak learning rate."""
    steps: int = 0
    """Number of steps to train; 0: until the time is spent, or the held-out loss stands still."""
    evaluate_every: float = 150.0
    """Time between two evaluations, in seconds."""
    save_every: float = 150.0
    """Time between two checkpoints, in seconds."""


@dataclass
class TrainingProgress:
    """State of a training run at one step."""

    step: int = 0
    """Number of steps done."""
    spent: float = 0.0
    """Processor time spent, in seconds."""
    history: list[tuple[float, float]] = field(default_factory=list)
    """Evaluations: seconds spent, held-out loss in nats per token."""


class Interrupted(Exception):
    """The run was asked to stop and has written its checkpoint."""


class Run:
    """One model in training, its checkpoint in `folder`, and a log there of one JSON line per evaluation."""

    def __init__(
        self,
        name: str,
        model: torch.nn.Module,
        settings: Settings,
        folder: Path,
        *,
        is_outer: Callable[[str, torch.nn.Parameter], bool] = lambda name, _: "embed" in name,
        after_step: Callable[[TrainingProgress, float], None] = lambda _progress, _loss: None,
    ) -> None:
        """Goes on from the checkpoint in `folder`, if there is one.

        Args:
            is_outer: whether a matrix, given with its name, is an embedding or an output matrix.
            after_step: called with the progress and the step's loss.

        Raises InvalidRequest where the checkpoint cannot be read.
        """
        self.name = name
        self.model = model
        self.settings = settings
        self.progress = TrainingProgress()
        self._after_step = after_step
        self._optimisers = optimisers(model, settings.rate, is_outer)
        self._checkpoint = folder / f"{name}.pt"
        self._log = folder / "log.jsonl"
        if self._checkpoint.exists():
            self._restore()

    def train(self, loss_of: LossOf, evaluate: Callable[[], float]) -> None:
        """Trains until the budget is spent or the held-out loss stands still."""
        with _StopRequest() as stop:
            saved = evaluated = self.progress.spent
            while self._share() < 1.0 and (self.settings.steps or not plateaued(self.progress.history)):
                loss = self._step(loss_of)
                self._after_step(self.progress, loss)
                if self.progress.spent - evaluated >= self.settings.evaluate_every:
                    evaluated = self.progress.spent
                    self._evaluate(evaluate, loss)
                if stop.requested or self.progress.spent - saved >= self.settings.save_every:
                    saved = self.progress.spent
                    self.save()
                if stop.requested:
                    raise Interrupted(self.name)
            if evaluated < self.progress.spent:
                self._evaluate(evaluate, loss=None)
            self.save()
            if stop.requested:  # since the last step
                raise Interrupted(self.name)

    def save(self) -> None:
        """Writes the checkpoint (weights, optimiser state, progress) whole or not at all."""
        state = {
            "model": self.model.state_dict(),
            "optimisers": [optimiser.state_dict() for optimiser in self._optimisers],
            "progress": asdict(self.progress),
        }
        partial = self._checkpoint.with_suffix(".partial")
        # A file of Python's own: torch's says of a full disk no more than "unexpected pos 704 vs 598".
        with partial.open("wb") as file:
            torch.save(state, file)
        os.replace(partial, self._checkpoint)

    def _restore(self) -> None:
        try:
            state: dict[str, Any] = torch.load(self._checkpoint, weights_only=True, map_location="cpu")
            self.model.load_state_dict(state["model"])
            for optimiser, saved in zip(self._optimisers, state["optimisers"], strict=True):
                optimiser.load_state_dict(saved)
            self.progress = TrainingProgress(**state["progress"])
        except Exception as error:
            why = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise InvalidRequest(
                f"the checkpoint {self._checkpoint} cannot be read ({why}): remove it to train anew"
            ) from error

    def _share(self) -> float:
        if self.settings.steps:
            return self.progress.step / self.settings.steps
        return self.progress.spent / self.settings.budget

    def _step(self, loss_of: LossOf) -> float:
        started = time.process_time()
        self.model.train()
        share = min(1.0, self._share())
        for optimiser in self._optimisers:
            for group in optimiser.param_groups:
                group["lr"] = self.settings.rate * rate_factor(self.progress.step, share)
        loss = loss_of(self.progress.step, share)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimiser in self._optimisers:
            optimiser.step()
            optimiser.zero_grad()
        self.progress.step += 1
        self.progress.spent += time.process_time() - started
        return float(loss.detach())

    def _evaluate(self, evaluate: Callable[[], float], loss: float | None) -> None:
        self.model.eval()
        held = evaluate()
        self.progress.history.append((self.progress.spent, held))
        line = {"run": self.name, "step": self.progress.step, "seconds": round(self.progress.spent, 1)}
        with self._log.open("a") as log:
            log.write(json.dumps({**line, "loss": loss, "held_out_loss": held}) + "\n")


def plateaued(history: list[tuple[float, float]]) -> bool:
    """Whether the best held-out loss fell by less than `PLATEAU_GAIN` over the last `PLATEAU_SECONDS`."""
    if not history:
        return False
    now = history[-1][0]
    before = [loss for seconds, loss in history if seconds <= now - PLATEAU_SECONDS]
    return bool(before) and min(loss for _, loss in history) > min(before) * (1.0 - PLATEAU_GAIN)


def optimisers(
    model: torch.nn.Module, rate: float, is_outer: Callable[[str, torch.nn.Parameter], bool]
) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for outer matrices (embeddings, outputs) and norms.

    On a corpus of a few million tokens Muon gets further per token than AdamW, for a few percent of a step.
    """
    inner: list[torch.nn.Parameter] = []
    outer: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (outer if parameter.ndim != 2 or is_outer(name, parameter) else inner).append(parameter)
    made: list[torch.optim.Optimizer] = []
    if inner:
        made.append(torch.optim.Muon(inner, lr=rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"))
    return [*made, torch.optim.AdamW(outer, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)]


def rate_factor(step: int, progress: float) -> float:
    """Factor of the peak learning rate, given the step and the share of the budget spent."""
    rising = min(1.0, (step + 1) / WARMUP)
    falling = min(1.0, (1.0 - progress) / (1.0 - DECAY_FROM))
    return min(rising, max(0.02, falling))


class _StopRequest:
    """While entered, SIGTERM asks for a stop at the next step instead of ending the process."""

    requested = False

    def __enter__(self) -> _StopRequest:
        self._previous = signal.signal(signal.SIGTERM, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, self._previous)

    def _ask(self, _number: int, _frame: FrameType | None) -> None:
        self.requested = True
