"""X6: when to stop drafting, by rules of the literature and by the pair's own measure, on a virtual clock."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from operator import mul
from typing import Any

import numpy as np

from benchmarks.experiments.chains import Rounds, pass_cost, speed
from benchmarks.experiments.experiment import Experiment, Judged, Rows, line, only, where
from benchmarks.experiments.pair import ModelPair, Scale, leading, log_softmax, ranker_of
from benchmarks.plots.curves import Panel
from benchmarks.shared.resumable import Key
from outrider.lm.plan import SequenceRows
from outrider.lm.runner import PackedLM
from outrider.pair.simulation import Truth
from speculative.digest import HostDigest

DEPTH = 12
COSTS = (0.05, 0.15, 0.4)
"""Times of a drafter's pass over a target's that the rules are compared at."""
BUDGET, ORACLE = "budget", "oracle"


class DraftedChain:
    """What a drafter drafts behind one place: estimates of each token, and how many tokens are right.

    Args:
        survival: per token, the drafter's estimate that it is right, given that those before are.
        probability: per token, the drafter's probability.
        entropy: per token, entropy of the drafter's distribution in nats.
        right: leading tokens of the chain that are the target's.
    """

    __slots__ = ("entropy", "probability", "right", "survival")

    def __init__(
        self, survival: Sequence[float], probability: Sequence[float], entropy: Sequence[float], right: int
    ) -> None:
        self.survival, self.probability, self.entropy = survival, probability, entropy
        self.right = right

    @classmethod
    def of(cls, record: Sequence[Any]) -> "DraftedChain":
        """The chain of a row of the result."""
        return cls(*record)


Stop = Callable[[DraftedChain], int]
"""How many tokens of a chain a rule drafts; the chain shows only what is known when each is drafted."""


def chains_of(lm: PackedLM, text: Truth) -> list[list[Any]]:
    """The chain that a drafter drafts behind every place of a text, as records of DraftedChain."""
    ranker, start = ranker_of(lm, text), text.prompt_length
    places = range(start, len(text.ids))
    tables = [lm.table(place + DEPTH) for place in places]
    fresh = [list(text.ids[:place]) for place in places]
    columns: list[tuple[list[float], list[float], list[float], list[int]]] = [
        ([], [], [], []) for _ in places
    ]
    for depth in range(DEPTH):
        shares = [
            SequenceRows(table, ids, range(-1, len(ids) - 1), [len(ids) - 1])
            for table, ids in zip(tables, fresh, strict=True)
        ]
        for at, row in enumerate(lm.forward(shares).rows()):
            tables[at].commit(range(len(fresh[at])))
            ((token, estimate),) = ranker.children(HostDigest(row), places[at] + depth, ())
            log_q = log_softmax(row)
            values = (estimate, float(np.exp(log_q[token])), float(-(np.exp(log_q) * log_q).sum()))
            for column, value in zip(columns[at][:3], values, strict=True):
                column.append(round(value, 5))
            columns[at][3].append(token)
            fresh[at] = [token]
    for table in tables:
        lm.release(table)
    found = []
    for place, (survival, probability, entropy, tokens) in zip(places, columns, strict=True):
        rest = text.ids[place:]
        matching = [drafted == token for drafted, token in zip(tokens, rest, strict=False)]
        right = leading(matching.__getitem__, len(matching))
        found.append([survival, probability, entropy, right])
    return found


def fixed(length: int) -> Callable[[], "Rule"]:
    """Always the same length."""
    return lambda: Rule(lambda chain: length)


def of_length(length: int, cost: float) -> "Rule":
    """The rule of a fixed length, whatever drafting costs."""
    return fixed(length)()


def below(threshold: float, column: str) -> Callable[[], "Rule"]:
    """Stops behind the first token whose estimate is below a threshold."""

    def stop(chain: DraftedChain) -> int:
        values: Sequence[float] = getattr(chain, column)
        return min(DEPTH, 1 + leading(lambda at: values[at] >= threshold, DEPTH))

    return lambda: Rule(stop)


def product_below(threshold: float) -> Callable[[], "Rule"]:
    """Stops before the chance that the whole chain is right falls below a threshold (EAGLE-2's ranking)."""

    def stop(chain: DraftedChain) -> int:
        products = list(accumulate(chain.survival, mul))
        return max(1, leading(lambda at: products[at] >= threshold, DEPTH))

    return lambda: Rule(stop)


class Rule:
    """A way to stop; some rules learn from how their drafts went.

    Args:
        stop: how many tokens of a chain are drafted.
    """

    def __init__(self, stop: Stop) -> None:
        self.stop = stop

    def learn(self, drafted: int, accepted: int, rate: float) -> None:
        """A round has ended; `rate` is its tokens per unit of time."""


class HeuristicRule(Rule):
    """transformers' rule of old: two tokens more where all were right, one fewer else."""

    def __init__(self) -> None:
        super().__init__(lambda chain: int(self._length))
        self._length = 5.0

    def learn(self, drafted: int, accepted: int, rate: float) -> None:
        self._length = min(DEPTH, self._length + 2) if accepted == drafted else max(1, self._length - 1)


class EntropyRule(Rule):
    """AdaEDL (arXiv 2410.18351): stops where 1 - sqrt(.2 H) falls below a bound that follows acceptance."""

    def __init__(self) -> None:
        super().__init__(self._stop)
        self._bound, self._rate = 0.4, 0.7

    def learn(self, drafted: int, accepted: int, rate: float) -> None:
        self._rate = 0.5 * self._rate + 0.5 * accepted / max(1, drafted)
        step = 0.01 if self._rate < 0.9 else -0.01
        self._bound = 0.9 * self._bound + 0.1 * (self._bound + step)

    def _stop(self, chain: DraftedChain) -> int:
        return min(
            DEPTH, 1 + leading(lambda at: 1 - math.sqrt(0.2 * chain.entropy[at]) >= self._bound, DEPTH)
        )


class BanditRule(Rule):
    """UCB over four lengths; the reward is tokens a unit of time."""

    LENGTHS = (1, 3, 6, 10)

    def __init__(self) -> None:
        super().__init__(self._stop)
        self._sums, self._counts = [0.0] * 4, [0] * 4
        self._chosen = 0

    def learn(self, drafted: int, accepted: int, rate: float) -> None:
        self._sums[self._chosen] += rate
        self._counts[self._chosen] += 1

    def _stop(self, chain: DraftedChain) -> int:
        if 0 in self._counts:
            self._chosen = self._counts.index(0)
        else:
            total = sum(self._counts)
            scores = [
                spent / count + math.sqrt(math.log(total) / count)
                for spent, count in zip(self._sums, self._counts, strict=True)
            ]
            self._chosen = scores.index(max(scores))
        return self.LENGTHS[self._chosen]


class BudgetRule(Rule):
    """Drafts one token more while its chance is worth more than the tokens that its time would bring.

    Args:
        draft_cost: time of a drafter's pass over a target's.
    """

    def __init__(self, draft_cost: float) -> None:
        super().__init__(self._stop)
        self._cost, self._rate = draft_cost, 1.0

    def learn(self, drafted: int, accepted: int, rate: float) -> None:
        self._rate = 0.95 * self._rate + 0.05 * rate

    def _stop(self, chain: DraftedChain) -> int:
        products = list(accumulate(chain.survival, mul))
        # The next token's survival is not known before it is drafted: the last one's stands for it.
        chances = [chain.survival[0], *(p * s for p, s in zip(products, chain.survival, strict=True))]

        def pays(at: int) -> bool:
            row = pass_cost(at + 2) - pass_cost(at + 1)
            return bool(chances[at] > (self._cost + row) * self._rate)

        return leading(pays, DEPTH)


RULES: Mapping[str, Callable[[float], Rule]] = {
    **{f"fixed {length}": partial(of_length, length) for length in range(1, DEPTH + 1)},
    "heuristic": lambda cost: HeuristicRule(),
    "confidence .4": lambda cost: below(0.4, "probability")(),
    "product .3": lambda cost: product_below(0.3)(),
    "entropy": lambda cost: EntropyRule(),
    "bandit": lambda cost: BanditRule(),
    BUDGET: BudgetRule,
    ORACLE: lambda cost: Rule(lambda chain: min(DEPTH, chain.right)),
}


def rounds_under(rule: Rule, texts: Sequence[Sequence[DraftedChain]], cost: float) -> Rounds:
    """The rounds of all texts under a rule that keeps what it learns from text to text."""
    rounds: Rounds = []
    for chains in texts:
        place = 0
        while place < len(chains):
            drafted = min(rule.stop(chains[place]), len(chains) - 1 - place)
            accepted = min(drafted, chains[place].right)
            rounds.append((drafted, accepted))
            rule.learn(drafted, accepted, (accepted + 1) / (pass_cost(drafted + 1) + cost * drafted))
            place += accepted + 1
    return rounds


def keys(scale: Scale) -> list[Key]:
    """An arm for each temperature; all rules read the same chains."""
    return [(0.0,), (0.8,)]


def measure(pair: ModelPair, key: Key) -> dict[str, Any]:
    """Speed of every rule at every cost."""
    temperature = float(key[0])
    texts = [
        [DraftedChain.of(record) for record in chains_of(pair.drafter, text)]
        for text in pair.texts(temperature)
    ]
    found = []
    for cost in COSTS:
        speeds = {}
        for name, rule in RULES.items():
            rounds = rounds_under(rule(cost), texts, cost)
            speeds[name] = round(speed(rounds, cost), 3)
        best = max(value for name, value in speeds.items() if name.startswith("fixed"))
        found.append({"cost": cost, "speed": speeds, "best_fixed": best})
    return {"temperature": temperature, "texts": len(texts), "by_cost": found}


def regrets(rows: Rows, rule: str) -> list[float]:
    """A rule's speed over that of the best fixed length, in all settings."""
    return [at["speed"][rule] / at["best_fixed"] for row in rows for at in row["by_cost"]]


def judge(rows: Rows) -> Sequence[Judged]:
    """Holds the predictions against the rows."""
    budget, heuristic, oracle = (regrets(rows, rule) for rule in (BUDGET, "heuristic", ORACLE))
    usual = [
        at["speed"][ORACLE] / at["best_fixed"] for row in rows for at in row["by_cost"] if at["cost"] == 0.15
    ]
    return (
        Judged(f"{min(budget):.2f} to {max(budget):.2f} of the best fixed length", min(budget) >= 0.97),
        Judged(
            f"{min(heuristic):.2f} to {max(heuristic):.2f}", min(heuristic) >= 0.85 and max(heuristic) <= 0.95
        ),
        Judged(
            f"{min(usual):.2f} to {max(usual):.2f} at .15, {min(oracle):.2f} to {max(oracle):.2f} in all",
            min(usual) >= 1.15 and max(usual) <= 1.25,
        ),
    )


def panels(rows: Rows) -> Sequence[Panel]:
    """Speed over the best fixed length, by the drafter's cost."""
    shown = [name for name in RULES if not name.startswith("fixed")]
    panels = []
    for temperature in (0.0, 0.8):
        by_cost = only(rows, temperature=temperature)["by_cost"]
        points = [
            {"cost": at["cost"], **{name: at["speed"][name] / at["best_fixed"] for name in shown}}
            for at in where(by_cost)
        ]
        curves = tuple(line(name, points, "cost", name) for name in shown)
        panels.append(
            Panel(f"T = {temperature:g}", "drafter's pass over target's", "over best fixed", curves)
        )
    return panels


X6 = Experiment(
    name="X6",
    question="Which rule should end a draft?",
    predictions=(
        "the budget, which weighs a token's chance against its time, reaches .97 of the best fixed length "
        "at every cost and temperature",
        "transformers' heuristic reaches .85 to .95",
        "an oracle that drafts only right tokens reaches 1.15 to 1.25 at the pair's cost",
    ),
    refuted_by="a best fixed length that beats the budget by more than 3 %: adapting would not be worth its "
    "code",
    keys=keys,
    measure=measure,
    judge=judge,
    panels=panels,
)
