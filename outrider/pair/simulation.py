"""Simulates drafting on a virtual clock: real models, the real session and draft pool, no processes.

The target's own continuations are computed first; drafts never change them. Then a verifier and a drafter run
side by side in simulated time with given step costs, and neither pauses.
"""

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from drafter_service.block_session import drafting_session
from drafter_service.draft_tree import Growth
from drafter_service.drafters import Drafter
from outrider.lm.plan import SequenceRows
from outrider.lm.runner import PackedLM
from outrider.source.events import DecodingRequest, Follow
from outrider.source.followed import FollowedIds, SourceProfile
from outrider.wire.codec import SessionKey
from speculative.choice import choose_token
from speculative.draft_pool import DraftPool
from speculative.fragment import Fragment
from speculative.hashing import prefix_hashes
from speculative.history import History
from speculative.noise import NoiseRows
from speculative.params import SamplingParams
from speculative.policies.policy import DraftPolicy
from speculative.survival_curve import SurvivalCurve
from speculative.tree import ROOT, TokenTree

TICK_MS = 0.1
"""Milliseconds between two looks of a waiting verifier for drafts."""


@dataclass(frozen=True, slots=True)
class Scene:
    """Costs in simulated milliseconds (a step of n rows takes `step + row * (n - 1)`), and bounds."""

    target_step: float = 7.0
    target_row: float = 0.15
    drafter_step: float = 0.95
    drafter_row: float = 0.15
    between: float = 0.4
    """Milliseconds from the end of a target step to the start of the next."""
    way: float = 0.4
    """Milliseconds that a message takes from one process to the other."""
    patience: float = 2.5
    """Milliseconds that the verifier waits where nothing is drafted."""
    node_limit: int = 16
    """Largest number of nodes that the verifier takes in one round."""
    in_flight: int = 64
    """Largest number of nodes that the drafter may have in flight."""
    nodes_per_pass: int = 5
    chains: bool = False
    """Whether the target verifies no branches."""


@dataclass(slots=True)
class Tally:
    """Counts over all simulated requests, and their simulated time."""

    tokens: int = 0
    rounds: int = 0
    bare_rounds: int = 0
    target_rows: int = 0
    passes: int = 0
    drafted: int = 0
    ms: float = 0.0

    def summary(self) -> dict[str, float]:
        """Ratios of the counts, with which simulations of different length can be compared."""
        return {
            "acceptance_length": round(self.tokens / self.rounds, 3),
            "tokens_per_second": round(1000 * self.tokens / self.ms, 1),
            "bare_rounds": round(self.bare_rounds / self.rounds, 3),
            "target_rows_per_round": round(self.target_rows / self.rounds, 2),
            "passes_per_round": round(self.passes / self.rounds, 2),
            "drafted_per_token": round(self.drafted / self.tokens, 2),
            "passes_per_drafted": round(self.passes / max(1, self.drafted), 3),
        }


@dataclass(frozen=True, slots=True)
class Truth:
    """A prompt and the target's continuation."""

    ids: tuple[int, ...]
    prompt_length: int
    params: SamplingParams
    seed: int


def continuation(lm: PackedLM, prompt: Sequence[int], params: SamplingParams, seed: int, count: int) -> Truth:
    """The target's continuation of a prompt by up to `count` tokens, decoded plainly, one at a time."""
    table, history = lm.table(len(prompt) + count), History.of(prompt, len(prompt))
    noise = NoiseRows(seed, lm.vocabulary_size)
    ids, fresh = list(prompt), list(prompt)
    while len(ids) < len(prompt) + count and ids[-1] not in lm.eos_ids:
        outcome = lm.forward([SequenceRows(table, fresh, range(-1, len(fresh) - 1), [len(fresh) - 1])])
        table.commit(range(len(fresh)))
        drawn = None if params.greedy else noise.at(len(ids))
        fresh = [choose_token(outcome.digest(0), params, history, drawn)]
        history.extend(fresh)
        ids += fresh
    lm.release(table)
    return Truth(tuple(ids), len(prompt), params, seed)


class Simulation:
    """One request: a verifier and a drafter, each with its own time; the one that is behind acts next.

    `policy` and `curves` are those of `drafting_session`.
    """

    def __init__(
        self,
        drafter: Drafter,
        truth: Truth,
        growth: Growth,
        scene: Scene,
        tally: Tally,
        policy: DraftPolicy | None = None,
        curves: Sequence[SurvivalCurve] = (),
    ) -> None:
        prompt, limit = truth.ids[: truth.prompt_length], len(truth.ids)
        width = drafter.abilities.width
        request = DecodingRequest(
            epoch=1,
            ids=prompt,
            prompt_length=len(prompt),
            limit=limit,
            params=truth.params,
            seed=truth.seed,
            node_limit=scene.in_flight,
            vocabulary_size=width,
        )
        self._drafter, self._truth, self._scene, self._tally = drafter, truth, scene, tally
        follow = Follow(0, 0, SessionKey("", "simulated"), request)
        ids = FollowedIds(prompt, width, SourceProfile("drafter", drafter.model))
        self._session = drafting_session(
            follow, ids, drafter.open(limit), drafter.abilities, growth, policy, curves
        )
        self.pool = self.pool_of(prompt, width, limit)
        """The drafts of the request."""
        self._hashes = prefix_hashes(truth.ids)
        self._fragments: list[tuple[float, int, Fragment]] = []  # by arrival
        self._lengths: list[tuple[float, int]] = []  # (arrival at the drafter in ms, committed length)
        self._serial = itertools.count()
        self._waited = 0.0

    def run(self) -> None:
        """Runs the request to its end and adds its counts to the tally."""
        verifier_ms = drafter_ms = 0.0
        while self.pool.length < len(self._truth.ids):
            if drafter_ms < verifier_ms:
                drafter_ms = self._draft(drafter_ms, verifier_ms)
            else:
                verifier_ms = self._verify(verifier_ms)
        self._drafter.close(self._session.cache)
        self._tally.ms += verifier_ms

    def pool_of(self, prompt: Sequence[int], width: int, limit: int) -> DraftPool:
        """The pool of the request's drafts."""
        return DraftPool(prompt, epoch=1, vocabulary_size=width, limit=limit)

    def tree(self, scene: Scene) -> TokenTree:
        """The drafted nodes that a round verifies."""
        rank = self.pool.rank_chain if scene.chains else self.pool.rank
        return rank(scene.node_limit).tree(scene.node_limit)

    def verified(self, tree: TokenTree, tokens: Sequence[int]) -> None:
        """Notes a round that is about to commit these tokens."""

    def _draft(self, now: float, until: float) -> float:
        while self._lengths and self._lengths[0][0] <= now:
            known, length = len(self._session.ids), heapq.heappop(self._lengths)[1]
            fresh = self._session.ids.extend(known, self._truth.ids[known:length], int(self._hashes[length]))
            self._session.commit(fresh, now)
            self._send(now)
        rows = self._session.plan(self._scene.nodes_per_pass, len(self._truth.ids))
        if rows is None:
            return min([until, *(at for at, _ in self._lengths)])
        self._session.grow(rows, self._drafter.forward([(self._session.cache, rows)]))
        self._tally.passes += 1
        now += self._scene.drafter_step + self._scene.drafter_row * (len(rows.tokens) - 1)
        self._send(now)
        return now

    def _send(self, now: float) -> None:
        for fragment in self._session.take_fragments():
            self._tally.drafted += len(fragment)
            heapq.heappush(self._fragments, (now + self._scene.way, next(self._serial), fragment))

    def _verify(self, now: float) -> float:
        while self._fragments and self._fragments[0][0] <= now:
            self.pool.offer(heapq.heappop(self._fragments)[2])
        if self.pool.is_bare and self._waited < self._scene.patience:
            self._waited += TICK_MS
            return now + TICK_MS
        self._waited = 0.0
        tree = self.tree(self._scene)
        ids, before = self._truth.ids, self.pool.length
        node, length = ROOT, before
        while length < len(ids) - 1 and (child := tree.children(node).get(ids[length])) is not None:
            node, length = child, length + 1
        self.verified(tree, ids[before : length + 1])
        self.pool.commit(ids[before : length + 1])
        tally = self._tally
        tally.tokens += length + 1 - before
        tally.rounds += 1
        tally.bare_rounds += not len(tree)
        tally.target_rows += 1 + len(tree)
        end = now + self._scene.target_step + self._scene.target_row * len(tree)
        heapq.heappush(self._lengths, (end + self._scene.way, length + 1))
        return end + self._scene.between
