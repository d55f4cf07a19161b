"""A second implementation of docs/edge.md, by its text alone: nothing of Outrider is imported. Plain Python.

It replays a recorded session and gives the windows that a device would send. It reads the parameters that the
recorded sessions use: temperature, top-k, top-p and presence penalty.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

WORD = 2**64 - 1
TOKENS_KEY = 0x746F6B656E730002
GREEDY = 1e-5
SCALE = 0.65


def mix(value: int) -> int:
    z = value + 0x9E3779B97F4A7C15 & WORD
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & WORD
    z = (z ^ z >> 27) * 0x94D049BB133111EB & WORD
    return z ^ z >> 31


def prefix_hash(ids: Sequence[int]) -> int:
    found = 0x6F75747269646572
    for id_ in ids:
        found = found * 0xD1342543DE82EF95 + mix(id_) & WORD
    return found


def philox(key: tuple[int, int], counter: Sequence[int]) -> list[int]:
    """The four words of a block of Philox4x64-10."""
    a, b, c, d = counter
    low, high = key
    for _ in range(10):
        left, right = 0xD2E7470EE14C6C93 * a, 0xCA5A826395121157 * c
        a, b, c, d = (right >> 64) ^ b ^ low, right & WORD, (left >> 64) ^ d ^ high, left & WORD
        low, high = low + 0x9E3779B97F4A7C15 & WORD, high + 0xBB67AE8584CAA73B & WORD
    return [a, b, c, d]


def lead(seed: int, position: int, id_: int) -> int:
    word = philox((seed, TOKENS_KEY), (id_ // 16, position, 0, 0))[id_ % 16 // 4]
    return word >> 16 * (id_ % 4) & 0xFFFF


def uniform(seed: int, position: int, id_: int) -> float:
    tail = philox((seed, TOKENS_KEY), (id_ // 4, position, 1, 0))[id_ % 4] >> 28
    return ((lead(seed, position, id_) << 36 | tail) + 0.5) * 2.0**-52


def noise(seed: int, position: int, id_: int) -> float:
    return -math.log(-math.log(uniform(seed, position, id_)))


def vocabulary_digest(tokens: Sequence[str]) -> str:
    lines = "".join(f"{id_}\t{token}\n" for id_, token in enumerate(tokens))
    return hashlib.sha256(lines.encode()).hexdigest()


class SecondDevice:
    """The device's side of one recorded session."""

    def __init__(self, session: dict[str, Any]) -> None:
        self._session = session
        self._seed = int(session["seed"], 16)
        self._model = {tuple(entry["ids"]): entry for entry in session["model"]}
        self._ids = list(session["prompt_ids"])
        self._chain: list[int] = []
        self._survival: list[float] = []
        self._windows: list[int] = []
        """Ends in the text of the windows on their way."""
        self._credits: int = session["credits"]
        self._epoch, self._told = int(session["epoch"], 16), 0

    def windows(self) -> Iterator[dict[str, Any]]:
        """The windows to send now."""
        while len(self._windows) < self._session["windows_in_flight"]:
            base = self._windows[-1] if self._windows else len(self._ids)
            at = base - len(self._ids)
            while len(self._chain) < at + self._session["window"] and not self._ended():
                self._draft()
            ids = self._chain[at : at + min(self._session["window"], self._credits)]
            if not ids:
                return
            self._credits -= len(ids)
            self._windows.append(base + len(ids))
            epoch, self._told = 0 if self._told == self._epoch else self._epoch, self._epoch
            yield {
                "base": base,
                "prefix_hash": prefix_hash([*self._ids, *self._chain[:at]]),
                "ids": ids,
                "epoch": epoch,
            }

    def receive(self, ids: Sequence[int], epoch: int) -> None:
        """Takes ids that the target chose."""
        if epoch:
            self._epoch, self._windows = epoch, []
        for id_ in ids:
            if self._chain and self._chain[0] == id_:
                share = self._survival[0]
                self._chain, self._survival = self._chain[1:], [one / share for one in self._survival[1:]]
            else:
                self._chain, self._survival, self._windows = [], [], []
            self._ids.append(id_)
        self._windows = [end for end in self._windows if end > len(self._ids)]
        self._credits += self._session["credits_per_token"] * len(ids)

    def _ended(self) -> bool:
        """Whether nothing is to be drafted behind the chain."""
        if len(self._ids) + len(self._chain) >= self._session["limit"]:
            return True
        last = self._chain[-1:]
        return bool(last) and (
            last[0] in self._session["end_ids"] or self._survival[-1] < self._session["least_survival"]
        )

    def _draft(self) -> None:
        whole = (*self._ids, *self._chain)
        scores = self._scores(whole)
        temperature = float(self._session["sampling"].get("temperature", 1.0))
        if temperature >= GREEDY:
            scores = {id_: score + noise(self._seed, len(whole), id_) for id_, score in scores.items()}
        best = min(scores, key=lambda id_: (-scores[id_], id_))
        unit = (temperature if temperature >= GREEDY else 1.0) / SCALE
        weights = {id_: math.exp((score - scores[best]) * unit) for id_, score in scores.items()}
        share = 1.0 / sum(weights.values())
        self._survival.append((self._survival[-1] if self._survival else 1.0) * share)
        self._chain.append(best)

    def _scores(self, whole: tuple[int, ...]) -> dict[int, float]:
        """The processed scores of the ids that remain."""
        entry, sampling = self._model[whole], self._session["sampling"]
        output = whole[len(self._session["prompt_ids"]) :]
        scores = dict(zip(entry["top_ids"], entry["top_logprobs"], strict=True))
        for id_ in scores.keys() & set(output):
            scores[id_] -= float(sampling.get("presence_penalty", 0.0))
        temperature = float(sampling.get("temperature", 1.0))
        if temperature < GREEDY:
            return scores
        scores = {id_: score / temperature for id_, score in scores.items()}
        order = sorted(scores, key=lambda id_: (-scores[id_], id_))
        order = order[: int(sampling.get("top_k", 0)) or None]
        weights = [math.exp(scores[id_] - scores[order[0]]) for id_ in order]
        wanted, summed, kept = float(sampling.get("top_p", 1.0)) * sum(weights), 0.0, 0
        while kept < len(order) and (summed < wanted or not kept):
            summed += weights[kept]
            kept += 1
        return {id_: scores[id_] for id_ in order[:kept]}
