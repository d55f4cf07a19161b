"""Chooses the depth by what earned most tokens per millisecond: BanditSpec (arXiv 2505.15141), with UCB1.

The arms are depths. All sessions of a worker share them, since one session has too few rounds to try each.
"""

import math
from dataclasses import replace

from speculative.policies.policy import DraftLimits, DraftPolicy, SeenProgress

_DEPTHS = (1, 2, 4, 8, 16, 32)
_ROUNDS = 4
"""Progresses for which an arm is kept: the first ones still commit what an earlier arm drafted."""
_KEEP = 0.98
"""Factor by which earlier pulls fade with each further one, as texts change."""
_LONGEST_MS = 1000.0
"""Longer gaps between two progresses are pauses of the source, not the price of a depth."""


class DepthArms:
    """Tokens per millisecond of each depth, over the sessions of a worker.

    Args:
        depths: the depth of each arm, ascending.
    """

    def __init__(self, depths: tuple[int, ...]) -> None:
        self.depths = depths
        self._pulls = [0.0] * len(depths)
        self._gains = [0.0] * len(depths)

    def choose(self, bonus: float) -> int:
        """The arm to pull next: one never pulled, else the one with the highest upper bound.

        `bonus` is the weight of an arm's uncertainty; 0 takes the best arm so far.
        """
        if 0.0 in self._pulls:
            return self._pulls.index(0.0)
        means = [gain / pulls for gain, pulls in zip(self._gains, self._pulls, strict=True)]
        scale, total = max(means) or 1.0, math.log(1 + sum(self._pulls))
        bounds = [
            mean / scale + bonus * math.sqrt(2 * total / pulls)
            for mean, pulls in zip(means, self._pulls, strict=True)
        ]
        return bounds.index(max(bounds))

    def reward(self, arm: int, tokens_per_ms: float) -> None:
        """Notes what a pull of an arm earned."""
        self._pulls = [max(pulls * _KEEP, 1e-6) if pulls else 0.0 for pulls in self._pulls]
        self._gains = [gain * _KEEP for gain in self._gains]
        self._pulls[arm] += 1
        self._gains[arm] += tokens_per_ms


class DepthBandit(DraftPolicy):
    """Pulls an arm for a few rounds, notes its tokens per millisecond, and chooses again. A DraftPolicy.

    Its value is the weight of an arm's uncertainty.
    """

    def __init__(self, bounds: DraftLimits, value: float, learnt: object = None) -> None:
        super().__init__(bounds, value)
        self._arms = learnt if isinstance(learnt, DepthArms) else self.learnt_anew(bounds)
        self._pull()

    @classmethod
    def learnt_anew(cls, bounds: DraftLimits) -> DepthArms:
        """Arms for the depths that the service allows, none of them pulled."""
        return DepthArms(tuple(depth for depth in _DEPTHS if depth <= bounds.depth) or (1,))

    @property
    def limits(self) -> DraftLimits:
        """The service's bounds with the depth of the present arm."""
        return replace(self.bounds, depth=self._arms.depths[self._arm])

    def saw(self, progress: SeenProgress) -> None:
        """Adds the progress to the present pull; rewards the arm at the pull's end."""
        if not 0 < progress.ms <= _LONGEST_MS:
            return
        self._rounds += 1
        self._tokens += progress.tokens
        self._ms += progress.ms
        if self._rounds == _ROUNDS:
            self._arms.reward(self._arm, self._tokens / self._ms)
            self._pull()

    def _pull(self) -> None:
        self._arm = self._arms.choose(self.value)
        self._rounds, self._tokens, self._ms = 0, 0, 0.0
