"""A policy over the drafts of a source inside the verifier, which hands whole drafts over at once."""

from collections.abc import Sequence

from speculative.draft import Draft
from speculative.policies.policy import DraftPoint, DraftPolicy, Guess, JudgedPlace, SeenProgress
from speculative.tree import ROOT


class LocalDrafts:
    """Cuts one source's drafts as its policy says, and tells the policy what came of them.

    A local source hands over tokens, not distributions: a policy that reads entropy sees none.
    """

    def __init__(self, policy: DraftPolicy) -> None:
        self._policy = policy
        self._draft: Draft | None = None
        """What is offered below the last committed token; None: nothing."""
        self._guessed: list[float] = []
        """The source's own estimate of each node of that draft, given the node's parent."""

    def cut(self, draft: Draft) -> Draft | None:
        """The nodes that the policy lets through; None if it lets none through."""
        limits, policy = self._policy.limits, self._policy
        kept: dict[int, int] = {}  # node of the draft -> node of the cut draft
        open_below = {ROOT: 0}  # nodes below which the draft goes on -> their depth
        children: dict[int, int] = {}
        survival: list[float] = []
        self._guessed = []
        for node, (parent, estimate) in enumerate(zip(draft.parents, draft.survival, strict=True)):
            depth = open_below.get(parent)
            if depth is None or depth >= limits.depth or len(kept) >= limits.nodes:
                continue
            if children.get(parent, 0) >= limits.children:
                continue
            before = draft.survival[parent] if parent != ROOT else 1.0
            probability = min(1.0, estimate / before) if before else 0.0
            believed = policy.estimate(probability, depth + 1, 0.0)
            reaches = believed * (survival[kept[parent]] if parent != ROOT else 1.0)
            if reaches < limits.floor:
                continue
            kept[node] = len(survival)
            survival.append(reaches)
            self._guessed.append(probability)
            children[parent] = children.get(parent, 0) + 1
            if policy.goes_on(DraftPoint(depth + 1, probability, reaches)):
                open_below[node] = depth + 1
        self._draft = (
            Draft(
                tuple(draft.tokens[node] for node in kept),
                tuple(kept.get(draft.parents[node], ROOT) for node in kept),
                tuple(survival),
            )
            if kept
            else None
        )
        return self._draft

    def committed(self, tokens: Sequence[int], ms: float) -> None:
        """Tells the policy which tokens were committed; `ms` is the length of a round, 0: not known."""
        trials: list[JudgedPlace] = []
        draft, at = self._draft, ROOT
        self._draft = None
        for depth, token in enumerate(tokens if draft is not None else (), 1):
            assert draft is not None
            there = [node for node, parent in enumerate(draft.parents) if parent == at]
            if not there:
                break
            guesses = tuple(Guess(self._guessed[node], draft.tokens[node] == token) for node in there)
            trials.append(JudgedPlace(depth, guesses))
            following = [node for node in there if draft.tokens[node] == token]
            if not following:
                break
            at = following[0]
        self._policy.saw(SeenProgress(len(tokens), tuple(trials), ms))
