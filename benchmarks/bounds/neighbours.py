"""kNN-LM: how often a cache of neighbours gives the token that a search of the whole datastore gives.

Khandelwal et al. (2020): p = l p_kNN + (1 - l) p_LM, where p_kNN weighs the tokens behind the nearest hidden
states of a datastore by exp(-distance / T). RaLMSpec guesses the neighbours from those found before and the
entries behind them, and verifies several searches at once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

_WINDOW = 512
"""Tokens of text that one forward reads."""
WEIGHT, NEIGHBOURS = 0.25, 64


@dataclass(frozen=True, slots=True)
class TextStates:
    """Hidden states of a text's places with what the model and the text say there."""

    keys: NDArray[np.float32]
    """State of each place, [places, width]."""
    tokens: NDArray[np.int64]
    """The text's token behind each place."""
    probabilities: NDArray[np.float32]
    """The model's distribution at each place, [places, V]; empty for a datastore."""


def states_of(model: str, texts: Sequence[Sequence[int]], *, with_probabilities: bool) -> TextStates:
    """States of texts, read in windows. A place has the state that predicts the token behind."""
    lm = AutoModelForCausalLM.from_pretrained(model).float().eval()
    keys, tokens, probabilities = [], [], []
    with torch.inference_mode():
        for window in _windows(texts):
            found = lm(torch.tensor([window]), output_hidden_states=True)
            keys.append(found.hidden_states[-1][0, :-1].numpy())
            tokens.append(np.array(window[1:]))
            if with_probabilities:
                probabilities.append(torch.softmax(found.logits[0, :-1], dim=-1).numpy())
    none = np.zeros((0, 0), np.float32)
    made = np.concatenate(probabilities) if probabilities else none
    return TextStates(np.concatenate(keys), np.concatenate(tokens), made)


def _windows(texts: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    for ids in texts:
        for start in range(0, len(ids) - 1, _WINDOW):
            window = list(ids[start : start + _WINDOW + 1])
            if len(window) > 1:
                yield window


class Datastore:
    """An exact search over the states of a text."""

    def __init__(self, states: TextStates) -> None:
        self._states = states
        self._norms = (states.keys**2).sum(axis=1)
        self._scale = float(np.median(self._norms)) / 8
        """Temperature of the distances."""

    def __len__(self) -> int:
        return len(self._states.tokens)

    def search(self, query: NDArray[np.float32], among: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
        """The nearest entries, all or `among` some."""
        keys = self._states.keys if among is None else self._states.keys[among]
        norms = self._norms if among is None else self._norms[among]
        distances = norms - 2 * (keys @ query)
        count = min(NEIGHBOURS, len(distances))
        near = np.argpartition(distances, count - 1)[:count]
        return near if among is None else among[near]

    def token(self, query: NDArray[np.float32], own: NDArray[np.float32], near: NDArray[np.int64]) -> int:
        """The likeliest token of the mixture with these neighbours."""
        distances = self._norms[near] - 2 * (self._states.keys[near] @ query)
        weights = np.exp(-(distances - distances.min()) / self._scale)
        mixed = (1 - WEIGHT) * own.astype(np.float64)
        np.add.at(mixed, self._states.tokens[near], WEIGHT * weights / weights.sum())
        return int(mixed.argmax())


def accuracy(store: Datastore, text: TextStates, ahead: int) -> dict[str, Any]:
    """How often the guessed neighbours give the token of a whole search.

    The cache holds the neighbours of the search before, and the `ahead` entries behind each.
    """
    cached = np.zeros(0, np.int64)
    right = same_as_alone = 0
    for query, own in zip(text.keys, text.probabilities, strict=True):
        true = store.search(query)
        token = store.token(query, own, true)
        if len(cached):
            right += store.token(query, own, store.search(query, cached)) == token
        same_as_alone += int(own.argmax()) == token
        behind = np.add.outer(true, np.arange(ahead + 1)).ravel()
        cached = np.unique(behind[behind < len(store)])
    places = len(text.keys)
    return {
        "accuracy": round(right / (places - 1), 4),
        "accuracy_without_neighbours": round(same_as_alone / places, 4),
    }


def best_speed(accuracy: float, searches: float, most: int = 16) -> dict[str, float]:
    """The largest factor over searching for each token, and the stride that brings the factor.

    Args:
        accuracy: chance that a guess is right, whatever came before.
        searches: time of a search, of one query or of a batch, in passes of the model.
    """

    def factor(stride: int) -> float:
        verified = sum(accuracy**step for step in range(stride))
        return verified * (1 + searches) / (stride + searches)

    stride = max(range(1, most + 1), key=factor)
    return {"factor": round(factor(stride), 2), "stride": stride}
