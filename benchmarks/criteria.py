"""Measures what each criterion gains and what it gives up: acceptance length beside the quality of the text.

Run as `outrider bench criteria --json`. The pair decodes held-out prompts in one process: the drafter drafts
or draws a window, one pass of the target computes it, production's criterion judges it.
docs/figures/criteria.md says what each field means, and docs/criteria.md what each criterion promises.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count as count_from
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.shared.envelope import MODELS, command_line, print_result, settings_of
from benchmarks.shared.heldout import load_prompts
from outrider.lm.kv.table import SlotTable
from outrider.lm.plan import SequenceRows
from outrider.lm.runner import PackedLM
from speculative.acceptance import CRITERIA
from speculative.acceptance.criterion import Criterion, KeyedChance, Promise
from speculative.acceptance.drawn import Draw, Drawn
from speculative.acceptance.lenience import Lenience
from speculative.acceptance.path_match import Match, path_match
from speculative.acceptance.rejection import residual
from speculative.digest import HostDigest
from speculative.draft_law import DraftLaws
from speculative.history import History
from speculative.implementations import load_implementation
from speculative.noise import NoiseRows, draft_word, gumbel
from speculative.params import SamplingParams
from speculative.sampling import process_logits
from speculative.target_sampler import TargetSampler
from speculative.tree import EMPTY_TREE, ROOT, TokenTree

Floats = NDArray[np.float64]
CHAIN, TREE = (1, 1, 1, 1, 1, 1), (3, 1, 1, 1)
"""Children of every node, level by level."""


@dataclass(frozen=True)
class Arm:
    """One way to decode."""

    name: str
    """A name of `CRITERIA`, `path_match`, or `plain` without drafts."""
    shape: tuple[int, ...] = CHAIN
    parameters: Mapping[str, float] = field(default_factory=dict)
    distinct: bool = False
    """Whether siblings are drawn without replacement."""

    @property
    def criterion(self) -> Criterion | None:
        """The criterion; None: the path match."""
        if self.name not in CRITERIA:
            return None
        made: Criterion = load_implementation(CRITERIA, self.name)(**self.parameters)
        return made


RELAXED = (
    Arm("specdec", parameters={"beta": 2, "gap": 0.5}),
    Arm("specdec"),
    Arm("blockwise", parameters={"top_k": 2}),
    Arm("blockwise", parameters={"least_block": 3}),
    Arm("bild", parameters={"rollback": 1.0}),
    Arm("bild", parameters={"rollback": 3.0}),
    Arm("bild", parameters={"rollback": 3.0, "fallback": 0.6, "dissent": 1}),
)
EXACT = (Arm("plain", ()), Arm("path_match"), Arm("path_match", TREE))
ARMS = {
    "greedy": (*EXACT, *RELAXED),
    "sampled": (
        *EXACT,
        Arm("ratio"),
        Arm("block"),
        Arm("multi_step", TREE),
        Arm("without_replacement", TREE, distinct=True),
        Arm("k_seq", TREE),
        Arm("lenience", parameters={"factor": 0.7}),
        Arm("lenience", parameters={"factor": 0.3}),
        Arm("typical"),
        Arm("typical", TREE),
        *RELAXED,
    ),
}


class Model:
    """One sequence of a model: ids in, rows of logits out."""

    def __init__(self, lm: PackedLM) -> None:
        self.lm = lm
        self.table: SlotTable = lm.table(512)

    def read(self, ids: Sequence[int], tree: TokenTree = EMPTY_TREE) -> NDArray[np.float32]:
        """Logits after all ids, then after each node; the uncomputed ids become a chain of kept nodes."""
        chain = ids[self.table.length :]
        tokens = [*chain, *tree.tokens]
        parents = [*range(-1, len(chain) - 1), *[parent + len(chain) for parent in tree.parents]]
        want = range(len(chain) - 1, len(tokens))
        return self.lm.forward([SequenceRows(self.table, tokens, parents, want)]).rows()

    def grow(self, tokens: Sequence[int], parents: Sequence[int]) -> NDArray[np.float32]:
        """Logits after further nodes, which hang below kept nodes."""
        return self.lm.forward([SequenceRows(self.table, tokens, parents, range(len(tokens)))]).rows()


class Drafting:
    """Draws or drafts the window of one round.

    Args:
        model: the drafter.
        params: the request's parameters, which process the drafter's logits as well.
        arm: the shape, and whether siblings are distinct.
        seed: seed of the request.
    """

    def __init__(self, model: Model, params: SamplingParams, arm: Arm, seed: int) -> None:
        self._model, self._params, self._arm, self._seed = model, params, arm, seed
        criterion = arm.criterion
        self._draws = criterion is not None and criterion.needs_q

    def window(self, ids: list[int], prompt: int) -> tuple[TokenTree, Drawn]:
        """The tree below the committed ids, and what was drawn from what."""
        if not self._arm.shape:
            return EMPTY_TREE, {}
        tokens: list[int] = []
        parents: list[int] = []
        survival: list[float] = []
        drawn: dict[int, tuple[Draw, ...]] = {}
        chain = len(ids) - self._model.table.length
        rows = self._model.read(ids)
        self._model.table.keep(tuple(range(chain)))
        level: list[tuple[int, tuple[int, ...]]] = [(ROOT, ())]
        width = rows.shape[1]
        laws = DraftLaws(self._params, ids, prompt, width=width, bound=width)
        words = map(partial(draft_word, self._seed, len(ids)), count_from(0))
        for count in self._arm.shape:
            below: list[tuple[int, tuple[int, ...]]] = []
            for row, (parent, path) in zip(rows, level, strict=True):
                if self._draws:
                    law = laws.after(row, path)
                    children = law.draw(count, words.__next__, distinct=self._arm.distinct)
                    shares = [float(law.law.of(token)) for token in children]
                else:
                    children, shares = self._likeliest(row, [*ids, *path], prompt, count)
                nodes: dict[int, int] = {}
                for token, share in zip(children, shares, strict=True):
                    if token not in nodes:
                        nodes[token] = len(tokens)
                        below.append((len(tokens), (*path, token)))
                        tokens.append(token)
                        parents.append(parent)
                        above = 1.0 if parent == ROOT else survival[parent]
                        survival.append(above * share)
                if self._draws:
                    drawn[parent] = tuple(Draw(nodes[token], law.law) for token in children)
            level = below
            if len(self._arm.shape) > 1 and below:
                rows = self._model.grow(
                    [tokens[node] for node, _ in below], [parents[node] for node, _ in below]
                )
        self._model.table.drop_nodes()
        return TokenTree(tuple(tokens), tuple(parents), tuple(survival), (1,) * len(tokens)), drawn

    def _likeliest(
        self, row: NDArray[np.float32], ids: Sequence[int], prompt: int, count: int
    ) -> tuple[list[int], list[float]]:
        """The likeliest tokens under the request's own noise, and their probabilities."""
        scores = process_logits(row, self._params, History.of(ids, prompt))
        scores -= scores.max()
        weights: Floats = np.exp(scores)
        weights /= weights.sum()
        with np.errstate(divide="ignore"):
            scores = np.log(weights)
        if not self._params.greedy:
            scores += gumbel(self._seed, len(ids), len(weights))
        found = [int(token) for token in np.argsort(-scores, kind="stable")[:count]]
        return found, [float(weights[token]) for token in found]


@dataclass
class Counts:
    """What an arm's rounds came to."""

    texts: list[tuple[int, ...]] = field(default_factory=list)
    """Texts of the asked length, whatever the last round of each committed beyond."""
    committed: int = 0
    """Tokens that rounds committed, those beyond the texts' ends included."""
    rounds: int = 0
    nodes: int = 0
    logprobs: list[float] = field(default_factory=list)
    variations: list[float] = field(default_factory=list)
    criterion_s: float = 0.0

    def figures(self, arm: Arm) -> dict[str, Any]:
        """The arm's row of the result."""
        criterion = arm.criterion
        return {
            "criterion": arm.name,
            "parameters": dict(arm.parameters),
            "promise": Promise.SAME_IDS if criterion is None else criterion.promise,
            "shape": list(arm.shape),
            "tokens": sum(map(len, self.texts)),
            "acceptance_length": round(self.committed / self.rounds, 3),
            "nodes_per_round": round(self.nodes / self.rounds, 2),
            "total_variation": round(float(np.mean(self.variations)), 4),
            "mean_logprob": round(float(np.mean(self.logprobs)), 4),
            "distinct_1": round(distinct(self.texts, 1), 4),
            "distinct_2": round(distinct(self.texts, 2), 4),
            "distinct_3": round(distinct(self.texts, 3), 4),
            "repeated_4grams": round(1 - distinct(self.texts, 4), 4),
            "criterion_ms": round(self.criterion_s * 1000 / self.rounds, 3),
        }


def ngrams(text: Sequence[int], size: int) -> Iterator[tuple[int, ...]]:
    """All runs of `size` tokens of a text."""
    return zip(*(text[start:] for start in range(size)), strict=False)


def distinct(texts: Sequence[Sequence[int]], size: int) -> float:
    """Share of n-grams that are the first of their kind in their text, over all texts."""
    found = [list(ngrams(text, size)) for text in texts]
    return sum(len(set(each)) for each in found) / max(1, sum(map(len, found)))


class CriteriaBench:
    """The pair, and the arms that decode with it.

    Args:
        settings: the benchmark's flags.
    """

    def __init__(self, settings: argparse.Namespace) -> None:
        self._settings = settings
        self._target, self._drafter = (
            PackedLM.load(folder, device="cpu", threads=1, kv_mb=64)
            for folder in (settings.target, settings.drafter)
        )
        self._prompts = load_prompts(settings.target, settings.prompts)

    def run(self, arm: Arm, mode: str) -> Counts:
        """Decodes all prompts with an arm."""
        temperature = 0.0 if mode == "greedy" else self._settings.temperature
        counts = Counts()
        for place, prompt in enumerate(self._prompts):
            decoder = Decoder(self._target, self._drafter, arm, SamplingParams(temperature=temperature))
            decoder.decode(prompt, self._settings.tokens, 1000 + place, counts)
        return counts


def _digest(rows: NDArray[np.float32], node: int) -> HostDigest:
    return HostDigest(rows[node + 1])


class Decoder:
    """Decodes one prompt by rounds of draft, pass and criterion."""

    def __init__(self, target: PackedLM, drafter: PackedLM, arm: Arm, params: SamplingParams) -> None:
        self._target, self._drafter = Model(target), Model(drafter)
        self._arm, self._params, self._criterion = arm, params, arm.criterion

    def decode(self, prompt: tuple[int, ...], tokens: int, seed: int, counts: Counts) -> None:
        """Adds a text of `tokens` tokens, and what its rounds came to, to `counts`.

        A last round that commits more counts whole in the acceptance length, which a cut would shorten, and
        not in the text and its quality, which are compared at one length.
        """
        ids, end = list(prompt), len(prompt) + tokens
        noise = NoiseRows(seed, self._target.lm.vocabulary_size)
        drafting = Drafting(self._drafter, self._params, self._arm, seed)
        while len(ids) < end:
            tree, drawn = drafting.window(ids, len(prompt))
            chain = len(ids) - self._target.table.length
            rows = self._target.read(ids, tree)
            sampler = TargetSampler(
                self._params,
                History.of(ids, len(prompt)),
                noise,
                len(ids),
                partial(_digest, rows),
            )
            began = time.process_time()
            match = self._match(tree, sampler, drawn, KeyedChance(seed, len(ids)))
            counts.criterion_s += time.process_time() - began
            self._count(match, end - len(ids), sampler, rows, drawn, counts)
            counts.rounds += 1
            counts.committed += len(match.tokens)
            counts.nodes += len(tree)
            self._target.table.keep((*range(chain), *[chain + node for node in match.path]))
            ids.extend(match.tokens)
        counts.texts.append(tuple(ids[len(prompt) : end]))
        self._target.table.close()
        self._drafter.table.close()

    def _match(self, tree: TokenTree, sampler: TargetSampler, drawn: Drawn, chance: KeyedChance) -> Match:
        if self._criterion is None:
            return path_match(tree, sampler)
        return self._criterion(tree, sampler, drawn, chance)

    def _count(
        self,
        match: Match,
        most: int,
        sampler: TargetSampler,
        rows: NDArray[np.float32],
        drawn: Drawn,
        counts: Counts,
    ) -> None:
        """Counts the quality of the round's first `most` tokens."""
        for depth, (node, token) in enumerate(zip((ROOT, *match.path), match.tokens[:most], strict=False)):
            row = rows[node + 1].astype(np.float64)
            row -= row.max()
            counts.logprobs.append(float(row[token] - np.log(np.exp(row).sum())))
            path = match.tokens[:depth]
            counts.variations.append(self._variation(node, path, token, sampler, drawn))

    def _variation(
        self, node: int, path: tuple[int, ...], token: int, sampler: TargetSampler, drawn: Drawn
    ) -> float:
        """Zero by proof; exact for lenience; else 1 where the token is not the target's own (a bound)."""
        criterion = self._criterion
        if criterion is not None and criterion.promise is Promise.SAME_LAW:
            return 0.0
        if not isinstance(criterion, Lenience):
            return float(token != sampler(node, path))
        if node not in drawn:
            return 0.0
        p, law = sampler.probabilities(node, path), drawn[node][0].law
        accepted = np.minimum(law.weights, p[law.ids] / criterion.factor)
        emitted = residual(p, law, criterion.factor) * (1 - accepted.sum())
        emitted[law.ids] += accepted
        return float(np.abs(emitted - p).sum() / 2)


def parse() -> argparse.Namespace:
    """Parses the flags; the figures in the docs have the default flags."""
    parser = command_line("criteria", __doc__)
    parser.add_argument("--target", default=str(MODELS / "target"), help="folder of the target model")
    parser.add_argument("--drafter", default=str(MODELS / "drafter"), help="folder of the drafter")
    parser.add_argument("--prompts", type=int, default=6, help="number of held-out prompts")
    parser.add_argument("--tokens", type=int, default=40, help="tokens of each prompt")
    parser.add_argument("--temperature", type=float, default=1.0, help="temperature of the sampled arms")
    return parser.parse_args()


def main() -> None:
    """Decodes with every arm in both modes and prints the result."""
    settings = parse()
    started = time.perf_counter()
    torch.set_num_threads(1)
    bench = CriteriaBench(settings)
    modes: dict[str, list[dict[str, Any]]] = {}
    identical = True
    for mode, arms in ARMS.items():
        found = [(arm, bench.run(arm, mode)) for arm in arms]
        modes[mode] = [counts.figures(arm) for arm, counts in found]
        plain = found[0][1].texts
        identical &= all(counts.texts == plain for arm, counts in found if arm.name == "path_match")
        print(f"{mode}: {len(arms)} arms", file=sys.stderr)
    print_result("criteria", settings_of(settings), started, {"identical": identical, "modes": modes})


if __name__ == "__main__":
    main()
