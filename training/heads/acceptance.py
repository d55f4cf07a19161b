"""Held-out acceptance of a head: chains drafted along text that the target wrote, greedy and sampled.

A chain is right up to the first token that differs from the target's. The true tokens and features are given
to the head at every place, which changes nothing before the first error, so one pass over a text measures the
chains from all of its places. Sampled text is drawn with the noise of a session, and the head's choice takes
the same noise: that is how drafts are chosen while serving.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache

from speculative.noise import gumbel
from training.heads.frozen import FrozenTarget, Ids
from training.heads.lessons import Advance
from training.heads.unrolled import TrainedHead, layers_of, unrolled

TEMPERATURES = (0.0, 0.8)
_NAMES = {0.0: "greedy", 0.8: "sampled"}


@dataclass(frozen=True)
class HeldOutText:
    """A prompt and the target's continuation."""

    ids: Ids
    prompt_length: int
    temperature: float
    seed: int
    """Seed of the session's noise."""


@dataclass(frozen=True)
class HeadAcceptance:
    """The target's acceptance of a head's chains."""

    by_place: tuple[float, ...]
    """By place of a chain: share of right drafts among chains whose earlier places were right."""
    length: float
    """Tokens per round if each round drafts one chain; 1 is plain decoding."""

    def as_object(self) -> dict[str, object]:
        """The fields as JSON prints them."""
        return {
            "acceptance_length": round(self.length, 3),
            "by_place": [round(share, 3) for share in self.by_place],
        }


def held_out_texts(
    target: FrozenTarget, prompts: Sequence[Sequence[int]], tokens: int, path: Path, advance: Advance
) -> list[HeldOutText]:
    """The target's continuations of prompts at both temperatures, kept in a file of `path`'s name."""
    found = _read(path)
    if found is None:
        found = []
        for number, temperature in enumerate(TEMPERATURES):
            found += _written(target, prompts, tokens, temperature)
            advance(number + 1, len(TEMPERATURES))
        _write(path, found)
    return found


@torch.inference_mode()
def held_out_acceptance(
    head: TrainedHead,
    target: FrozenTarget,
    texts: Sequence[HeldOutText],
    depth: int,
    beside: TrainedHead | None = None,
) -> dict[str, HeadAcceptance]:
    """Acceptance of chains of `depth` tokens by the way that the texts were written: "greedy", "sampled".

    With a head `beside`, each round drafts a chain of both, and the longer right one counts.
    """
    heads = [head] if beside is None else [head, beside]
    for one in heads:
        one.eval()
    found = {}
    for temperature in TEMPERATURES:
        right = [
            np.maximum.reduce([_right(one, target, text, depth) for one in heads])
            for text in texts
            if text.temperature == temperature
        ]
        found[_NAMES[temperature]] = _summed(right, depth)
    return found


def _summed(right: Sequence[npt.NDArray[np.int64]], depth: int) -> HeadAcceptance:
    """The acceptance of texts, given the number of right tokens of the chain from each of their places."""
    lengths = np.concatenate(right) if right else np.zeros(0, dtype=np.int64)
    shares = []
    for place in range(depth):
        reached = int((lengths >= place).sum())
        shares.append(int((lengths > place).sum()) / max(1, reached))
    tokens = rounds = 0
    for counts in right:
        at = 0
        while at < len(counts):
            tokens += int(counts[at]) + 1
            rounds += 1
            at += int(counts[at]) + 1
    return HeadAcceptance(tuple(shares), tokens / max(1, rounds))


def _right(head: TrainedHead, target: FrozenTarget, text: HeldOutText, depth: int) -> npt.NDArray[np.int64]:
    """Number of right tokens of the chain from each place of the written part: int64 [places]."""
    ids = torch.from_numpy(text.ids.astype(np.int64))[None].to(target.device)
    first, behind = text.prompt_length - 1, len(text.ids) - depth - 1
    if behind <= first:
        return np.zeros(0, dtype=np.int64)
    roots = torch.arange(first, behind, device=target.device)
    features = target.states(ids, layers_of(head)).read
    alive = torch.ones(len(roots), dtype=torch.bool)
    count = torch.zeros(len(roots), dtype=torch.long)
    for step, (logits, _) in enumerate(unrolled(head, ids, features, depth, roots), start=1):
        places = range(first + step + 1, behind + step + 1)
        drafted = _chosen(logits[0].float().cpu(), text, places)
        alive &= drafted == ids[0, places.start : places.stop].cpu()
        count += alive
    return count.numpy()


def _chosen(logits: torch.Tensor, text: HeldOutText, positions: Sequence[int]) -> torch.Tensor:
    """Tokens that logits [rows, vocabulary] choose at positions, with the session's noise: int64 [rows]."""
    if text.temperature == 0.0:
        return logits.argmax(-1)
    noise = np.stack([gumbel(text.seed, position, logits.shape[1]) for position in positions])
    return (logits.log_softmax(-1).double() / text.temperature + torch.from_numpy(noise)).argmax(-1)


@torch.inference_mode()
def _written(
    target: FrozenTarget, prompts: Sequence[Sequence[int]], tokens: int, temperature: float
) -> Iterator[HeldOutText]:
    """Continues all prompts in one batch, padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(one)) + list(one) for one in prompts], device=target.device)
    mask = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in prompts]).to(ids)
    texts = [
        HeldOutText(np.asarray(one, dtype=np.uint32), len(one), temperature, seed)
        for seed, one in enumerate(prompts)
    ]
    cache, written = DynamicCache(config=target.model.config), []
    given = ids
    for place in range(tokens):
        logits = target.model(
            input_ids=given,
            attention_mask=mask,
            position_ids=(mask.cumsum(-1) - 1).clamp(min=0)[:, -given.shape[1] :],
            past_key_values=cache,
            logits_to_keep=1,
        ).logits[:, -1]
        rows = logits.float().cpu()
        chosen = [
            _chosen(row[None], text, [len(text.ids) + place]) for row, text in zip(rows, texts, strict=True)
        ]
        given = torch.stack(chosen).to(target.device)
        written.append(given)
        mask = torch.cat([mask, torch.ones_like(given)], dim=1)
    behind = torch.cat(written, dim=1).cpu().numpy().astype(np.uint32)
    for text, row in zip(texts, behind, strict=True):
        whole = np.concatenate([text.ids, _until(row, target.eos)])
        yield HeldOutText(whole, text.prompt_length, temperature, text.seed)


def _until(ids: Ids, eos: int) -> Ids:
    """Ids up to the first that ends a text, with it."""
    ends = np.flatnonzero(ids == eos)
    return ids[: ends[0] + 1] if len(ends) else ids


def _write(path: Path, texts: Sequence[HeldOutText]) -> None:
    partial = path.with_suffix(".partial.npz")
    fields = np.array([(text.prompt_length, text.temperature, text.seed) for text in texts])
    np.savez(partial, fields, *(text.ids for text in texts))
    partial.replace(path)


def _read(path: Path) -> list[HeldOutText] | None:
    """The texts of a file; None if the file is missing or was cut off."""
    try:
        with np.load(path) as file:
            fields, *ids = (file[name] for name in file.files)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):
        return None
    return [
        HeldOutText(one, int(length), float(temperature), int(seed))
        for one, (length, temperature, seed) in zip(ids, fields, strict=True)
    ]
