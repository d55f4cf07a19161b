"""Counts what merged drafts promise and what becomes of them, on a virtual clock with real models.

The target's own continuations are computed first, as drafts never change them. Then a verifier and a drafter
run side by side in simulated time, as in `drafter_sim`, with a lookup in the session's own text, the
verifier's calibration and its budget. Arms differ in how the estimates of several sources are merged, and in
whether the lookup goes on below the drafter's leaves. Run `outrider bench merged-drafts --json`; the last
line is one JSON object. docs/figures/merged_drafts.md says what each field means.
"""

import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from benchmarks.shared.envelope import add_pair, command_line, print_result, settings_of
from benchmarks.shared.heldout import tokenizer_of
from benchmarks.sources.prompt_sets import SETS, prompt_set
from drafter_service.draft_tree import Growth
from drafter_service.drafters.causal_lm import CausalLMDrafter
from outrider.lm.runner import PackedLM
from outrider.pair.simulation import Scene, Simulation, Tally, Truth, continuation
from outrider.wire.names import LOOKUP_BELOW
from speculative.budget import allot
from speculative.calibration import Calibration, SessionCalibrator
from speculative.draft_nodes import PoolNode, RankedNodes
from speculative.draft_pool import DraftPool
from speculative.fragment import Fragment
from speculative.params import SamplingParams
from speculative.survival_curve import SurvivalCurve
from speculative.tree import TokenTree
from verifier_service.engine.draft_budget import LEAST_GAIN
from verifier_service.proposers import ProposerInit, make_leaf_proposer, make_proposer
from verifier_service.proposers.own_text.lookup import LEAST_SURVIVAL, LEAVES, NODES

DRAFTER, LOOKUP, BELOW = 1, 2, 3
NAMES: Final = {DRAFTER: "drafter", LOOKUP: "lookup", BELOW: LOOKUP_BELOW}
FIRST_ROUNDS = 30
"""Rounds at the beginning of an answer whose rows are counted apart."""


class Arm(NamedTuple):
    """How drafts are merged."""

    shared: bool = False
    """Whether siblings share a probability of at most 1."""
    pooled: bool = False
    """Whether a node's sources are taken as independent: it is wrong only if all of them are."""
    below: bool = False
    """Whether the lookup goes on below the drafter's leaves."""


ARMS = {
    "largest": Arm(),
    "shared": Arm(shared=True),
    "pooled": Arm(shared=True, pooled=True),
    "below": Arm(below=True),
}


@dataclass(slots=True)
class Counts:
    """Counts over the answers of one cell."""

    tally: Tally = field(default_factory=Tally)
    promised: float = 0.0
    """Sum of the survivals of all admitted nodes."""
    admitted: Counter[str] = field(default_factory=Counter)
    """Admitted nodes by the source that offered them first."""
    accepted: Counter[str] = field(default_factory=Counter)
    contested: int = 0
    """Committed places for which sources had drafted different tokens."""
    contested_promise: float = 0.0
    contested_right: int = 0
    first_rounds: int = 0
    first_bare: int = 0
    first_admitted: int = 0
    first_accepted: int = 0

    def summary(self, scene: Scene) -> dict[str, Any]:
        """The fields of one arm."""
        accepted, places = max(1, sum(self.accepted.values())), max(1, self.contested)
        wasted_ms = scene.target_row * (self.first_admitted - self.first_accepted)
        first_ms = self.first_rounds * (scene.target_step + scene.between)
        return {
            "rounds": self.tally.rounds,
            "acceptance_length": round(self.tally.tokens / self.tally.rounds, 3),
            "tokens_per_second": round(1000 * self.tally.tokens / self.tally.ms, 1),
            "admitted": dict(self.admitted),
            "accepted": dict(self.accepted),
            "admitted_per_accepted": round(sum(self.admitted.values()) / accepted, 3),
            "promised_per_accepted": round(self.promised / accepted, 3),
            "contested": {
                "places": self.contested,
                "promised": round(self.contested_promise / places, 3),
                "right": round(self.contested_right / places, 3),
            },
            "first_rounds": {
                "rounds": self.first_rounds,
                "bare": self.first_bare,
                "admitted": self.first_admitted,
                "accepted": self.first_accepted,
                "rejected_time": round(
                    wasted_ms / max(1e-9, first_ms + scene.target_row * self.first_admitted), 3
                ),
            },
        }


class ArmPool(DraftPool):
    """A pool that merges estimates as an arm does; `known` calibrates what each source says."""

    def __init__(
        self, prompt: Sequence[int], width: int, limit: int, arm: Arm, known: SessionCalibrator
    ) -> None:
        super().__init__(prompt, epoch=1, vocabulary_size=width, limit=limit, calibrator=known)
        self._arm, self._known = arm, known

    @property
    def root(self) -> PoolNode:
        """The node of the last committed token."""
        return self._root

    def rank(self, node_limit: int) -> RankedNodes:
        """As a DraftPool's, with the arm's survivals."""
        if self._arm.shared:
            self._outdated = True
        return super().rank(node_limit)

    def _work_out_survivals(self) -> None:
        if not self._arm.shared:
            super()._work_out_survivals()
            return
        self._root.survival, self._outdated = 1.0, False
        left = [self._root]
        for node in left:
            children = list(node.children.values())
            given = [self._given(child) for child in children]
            share = 1.0 / max(1.0, sum(given))
            for child, each in zip(children, given, strict=True):
                child.survival = node.survival * each * share
            left += children

    def _given(self, node: PoolNode) -> float:
        if not self._arm.pooled:
            return node.given_parent
        wrong = 1.0
        for source, estimate in node.estimates.items():
            wrong *= 1.0 - self._known.worth(source, estimate)
        return 1.0 - wrong


class MergedSimulation(Simulation):
    """One request, drafted for by the drafter and by lookups, with the verifier's calibration and budget."""

    def __init__(
        self,
        drafter: CausalLMDrafter,
        truth: Truth,
        scene: Scene,
        arm: Arm,
        counts: Counts,
        priors: Sequence[Calibration],
        curve: SurvivalCurve,
    ) -> None:
        self.calibrator = SessionCalibrator(priors)
        """What the sources' estimates are worth."""
        self._arm, self._counts = arm, counts
        self._ids = truth.ids
        init = ProposerInit(truth.prompt_length)
        self._lookup = make_proposer("lookup", init)
        self._below = make_leaf_proposer(LOOKUP_BELOW, init)
        self._looked_up = 0
        self._rounds = 0
        self._costs = [scene.target_step + scene.target_row * rows for rows in range(scene.node_limit + 1)]
        super().__init__(drafter, truth, Growth(), scene, counts.tally, curves=[curve])

    def pool_of(self, prompt: Sequence[int], width: int, limit: int) -> DraftPool:
        """The arm's pool."""
        return ArmPool(prompt, width, limit, self._arm, self.calibrator)

    def tree(self, scene: Scene) -> TokenTree:
        """The nodes that the budget admits, after the lookups have drafted."""
        length = self.pool.length
        if self._looked_up < length:
            self._lookup.append(self._ids[self._looked_up : length])
            self._below.append(self._ids[self._looked_up : length])
            self._looked_up = length
            if (found := self._lookup.propose(scene.node_limit)) is not None:
                self._offer(LOOKUP, length, self.pool.hash_at(length), found)
        for leaf in self.pool.leaves(LEAVES, LEAST_SURVIVAL, {LOOKUP, BELOW}) if self._arm.below else ():
            if (found := self._below.propose_below(leaf.path, NODES)) is not None:
                self._offer(BELOW, length + len(leaf.path), leaf.hash, found)
        ranked = self.pool.rank(scene.node_limit)
        (count,) = allot([ranked.survivals], 1, self._costs[: len(ranked.survivals) + 1], LEAST_GAIN)
        return ranked.tree(count)

    def _offer(self, source: int, base: int, prefix_hash: int, found: Any) -> None:
        self.pool.offer(Fragment(source, 1, base, prefix_hash, found.tokens, found.parents, found.survival))

    def verified(self, tree: TokenTree, tokens: Sequence[int]) -> None:
        """Counts a round."""
        counts, accepted = self._counts, len(tokens) - 1
        self._rounds += 1
        counts.promised += sum(tree.survival)
        counts.admitted.update(NAMES[source] for source in tree.sources)
        node = -1
        for token in tokens[:accepted]:
            node = tree.children(node)[token]
            counts.accepted[NAMES[tree.sources[node]]] += 1
        if self._rounds <= FIRST_ROUNDS:
            counts.first_rounds += 1
            counts.first_bare += not len(tree)
            counts.first_admitted += len(tree)
            counts.first_accepted += accepted
        self._count_contested(tokens)

    def _count_contested(self, tokens: Sequence[int]) -> None:
        counts = self._counts
        assert isinstance(self.pool, ArmPool)
        node: PoolNode | None = self.pool.root
        for token in tokens:
            if node is None or not node.children:
                break
            children = node.children.values()
            by_source = {
                source: frozenset(child.token for child in children if source in child.estimates)
                for source in NAMES
            }
            if len(set(filter(None, by_source.values()))) > 1:
                counts.contested += 1
                counts.contested_promise += sum(child.given_parent for child in children)
                counts.contested_right += token in node.children
            node = node.children.get(token)


def replayed(drafter: CausalLMDrafter, truths: Sequence[Truth], scene: Scene, arm: Arm) -> dict[str, Any]:
    """One arm over the answers to a set; later answers know what earlier ones taught about the sources."""
    counts, curve, priors = Counts(), SurvivalCurve(), [Calibration() for _ in NAMES]
    for truth in truths:
        request = MergedSimulation(drafter, truth, scene, arm, counts, priors, SurvivalCurve(curve))
        request.run()
        request.calibrator.learn()
    return counts.summary(scene)


def flags() -> Namespace:
    """Parses the flags; the figures in the docs have the default flags."""
    parser = command_line("merged-drafts", (__doc__ or "").splitlines()[0])
    add_pair(parser)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS), help="sets of prompts")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS), help="arms to replay")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 0.8], help="one or more")
    parser.add_argument("--prompts", type=int, default=8, help="requests of each set, at most")
    parser.add_argument("--tokens", type=int, default=96, help="most tokens of an answer")
    parser.add_argument("--target-step", type=float, default=2.5, help="ms of a target pass")
    parser.add_argument("--target-row", type=float, default=0.1, help="ms of a further row")
    parser.add_argument("--drafter-step", type=float, default=0.6, help="ms of a drafter pass")
    parser.add_argument("--drafter-row", type=float, default=0.05, help="ms of a further row")
    return parser.parse_args()


def measure(args: Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """All arms on all sets, and the sums of rounds, admitted and accepted nodes by temperature and arm."""
    target = PackedLM.load(args.target, check=False)
    drafter = CausalLMDrafter(PackedLM.load(args.drafter, check=False))
    tokenizer = tokenizer_of(args.target)
    scene = Scene(
        target_step=args.target_step,
        target_row=args.target_row,
        drafter_step=args.drafter_step,
        drafter_row=args.drafter_row,
    )
    figures: dict[str, dict[str, dict[str, Any]]] = {}
    for temperature in args.temperatures:
        for name in args.sets:
            texts = [
                "\n".join(question.turns)
                for question in prompt_set(name, args.target, args.prompts).questions
            ]
            params = SamplingParams(temperature=temperature)
            truths = [
                continuation(target, tuple(tokenizer.encode(text).ids), params, seed, args.tokens)
                for seed, text in enumerate(texts)
            ]
            cell = {arm: replayed(drafter, truths, scene, ARMS[arm]) for arm in args.arms}
            figures.setdefault(f"{temperature:g}", {})[name] = cell
            say(f"{name} at {temperature:g}")
    sums = {
        temperature: {arm: _sums([cell[arm] for cell in cells.values()]) for arm in args.arms}
        for temperature, cells in figures.items()
    }
    return {"figures": figures, "sums": sums}


def _sums(cells: Sequence[dict[str, Any]]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for cell in cells:
        found["rounds"] += cell["rounds"]
        found["admitted"] += sum(cell["admitted"].values())
        found["accepted"] += sum(cell["accepted"].values())
    return dict(found)


def main() -> None:
    """Replays all arms and prints the result."""
    args, started = flags(), time.perf_counter()
    print_result(
        "merged-drafts", settings_of(args), started, measure(args, lambda text: print(text, flush=True))
    )


if __name__ == "__main__":
    main()
