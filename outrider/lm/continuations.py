"""A model's own continuations of prompts, and how well parts of the model predict them.

The model writes a continuation of each prompt. Without some sublayers it is then asked for each of these
tokens, given the tokens before: the share that it gets right is the acceptance of drafts one token long.
Where the model samples, both sides add the same noise.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from outrider.lm.load.part import layer_stack
from outrider.lm.load.sublayers import Steps, whole_only
from outrider.skip_set import KINDS, Kind, SkipSet, Sublayer
from speculative.errors import ModelRefused

_SEED = 17


class Continuations:
    """The target's own continuations of some prompts, and how well parts of the target predict them.

    Args:
        model: the target, in evaluation mode.
        prompts: token ids of each prompt.
        tokens: number of tokens to write for each.
        temperature: 0: greedy.

    Raises ModelRefused if the model has no list of layers.
    """

    def __init__(
        self, model: PreTrainedModel, prompts: Sequence[Sequence[int]], tokens: int, temperature: float = 0.0
    ) -> None:
        stack = layer_stack(model)
        if stack is None:
            kind = model.config.model_type
            raise ModelRefused(f"no layers of {kind} can be skipped: it has no list of layers", kind)
        self.layers = len(stack)
        self.whole_only = whole_only(model, list(stack))
        """Why layers cannot be skipped in part; empty where they can."""
        self._stack = stack
        self._model = model
        self._starts = [len(prompt) for prompt in prompts]
        self._temperature = temperature
        self._texts = [self._continued(prompt, tokens, at) for at, prompt in enumerate(prompts)]

    def acceptance(self, skip: SkipSet, guesses: int = 1) -> float:
        """Share of the tokens that are among the `guesses` best without the sublayers `skip`.

        Raises ModelRefused for a part of a layer where layers are skipped whole only.
        """
        right = count = 0
        with self._without(skip):
            for at, (text, start) in enumerate(zip(self._texts, self._starts, strict=True)):
                scores = self._scores(text[:-1], start, at)
                best = scores.topk(min(guesses, scores.shape[-1])).indices
                right += int((best == torch.tensor(text[start:])[:, None]).any(-1).sum())
                count += len(text) - start
        return right / count

    @contextmanager
    def _without(self, skip: SkipSet) -> Iterator[None]:
        """Context in which the model runs without these sublayers."""
        with ExitStack() as undo:
            for at in {sublayer.layer for sublayer in skip}:
                left: list[Kind] = [kind for kind in KINDS if Sublayer(at, kind) not in skip]
                if not self.whole_only:
                    steps = Steps([(self._stack[at], kind) for kind in left])
                    undo.enter_context(_in_place(self._stack, at, steps))
                elif left:
                    raise ModelRefused(self.whole_only, self._model.config.model_type)
                else:
                    undo.enter_context(_passing_by(self._stack[at]))
            yield

    def _scores(self, ids: Sequence[int], start: int, prompt: int) -> torch.Tensor:
        """Scores for the tokens from `start` on, noise included, float32 ``[places, ids]``."""
        with torch.inference_mode():
            device = self._model.device
            logits = self._model(torch.tensor([list(ids)], device=device), use_cache=False).logits
        scores: torch.Tensor = logits[0, start - 1 :].float().cpu()
        if not self._temperature:
            return scores
        rows = [self._noise(prompt, start + at, scores.shape[-1]) for at in range(len(scores))]
        return scores / self._temperature + torch.stack(rows)

    def _noise(self, prompt: int, position: int, width: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(_SEED + 1_000_003 * prompt + position)
        return -torch.empty(width).exponential_(generator=generator).log()

    def _continued(self, prompt: Sequence[int], tokens: int, at: int) -> list[int]:
        ids = list(prompt)
        cache: Any = None
        fresh = ids
        for _ in range(tokens):
            with torch.inference_mode():
                device = self._model.device
                found = self._model(
                    torch.tensor([fresh], device=device), past_key_values=cache, use_cache=True
                )
            cache = found.past_key_values
            scores = found.logits[0, -1].float().cpu()
            if self._temperature:
                scores = scores / self._temperature + self._noise(at, len(ids), len(scores))
            fresh = [int(scores.argmax())]
            ids += fresh
        return ids


@contextmanager
def _in_place(stack: nn.ModuleList, at: int, other: nn.Module) -> Iterator[None]:
    """Context in which another module runs instead of a layer."""
    layer = stack[at]
    stack[at] = other
    try:
        yield
    finally:
        stack[at] = layer


@contextmanager
def _passing_by(layer: nn.Module) -> Iterator[None]:
    """Context in which a layer of any form returns its input unchanged."""

    def give_back(_module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        return inputs[0] if isinstance(output, torch.Tensor) else (inputs[0], *output[1:])

    hook = layer.register_forward_hook(give_back)
    try:
        yield
    finally:
        hook.remove()
