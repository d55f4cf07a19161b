"""Compares draft policies with fixed depths and with an oracle, on a virtual clock.

The target's own continuations are computed first, as drafts never change them. Then a verifier and a drafter
run side by side in simulated time, through the real drafting session and the real draft pool, with costs of
passes and rows that the flags give. The oracle knows how many places ahead hold a token that the drafter
ranks among its children, and drafts exactly so deep. Run `outrider bench policies --json`. The last line is
one JSON object. docs/figures/policies.md says what each field means.
"""

import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tokenizers import Tokenizer

from benchmarks.shared.envelope import add_pair, command_line, print_result, settings_of
from benchmarks.shared.heldout import held_out_records, repeated
from benchmarks.sources.prompt_sets import SETS, prompt_set
from benchmarks.spec_bench.turns import plain
from drafter_service.draft_tree import Growth
from drafter_service.drafters.causal_lm import CausalLMDrafter
from outrider.lm.plan import SequenceRows
from outrider.lm.runner import PackedLM
from outrider.pair.simulation import Scene, Simulation, Tally, Truth, continuation
from speculative.digest import HostDigest
from speculative.params import SamplingParams
from speculative.policies.book import PolicyBook
from speculative.policies.names import DEFAULT_POLICY, POLICIES
from speculative.policies.policy import DraftLimits, DraftPolicy, SeenProgress
from speculative.ranking import ChildRanker
from speculative.survival_curve import SurvivalCurve

GROWTH = Growth()
SCENE = Scene()
REPEATED = "repeated"
"""The set of held-out code with its first half repeated behind it."""
DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16, 32)


class OracleDepth(DraftPolicy):
    """Drafts as many places ahead as the drafter gets right. Knows the answer, so it serves no request."""

    def __init__(self, bounds: DraftLimits, right: Sequence[bool]) -> None:
        super().__init__(bounds, 0.0)
        self._runs = [0] * (len(right) + 1)  # by number of committed tokens of the answer
        for at in range(len(right) - 1, -1, -1):
            self._runs[at] = self._runs[at + 1] + 1 if right[at] else 0
        self._committed = 0

    @property
    def limits(self) -> DraftLimits:
        """The bounds with the depth of the places that will be right, at least 1."""
        run = self._runs[min(self._committed, len(self._runs) - 1)]
        return replace(self.bounds, depth=min(max(1, run), self.bounds.depth))

    def saw(self, progress: SeenProgress) -> None:
        """Follows the answer."""
        self._committed += progress.tokens


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Answers of the target to a set of prompts, and where the drafter is right."""

    name: str
    truths: tuple[Truth, ...]
    right: tuple[tuple[bool, ...], ...]
    """For each token of each answer: whether it is one of the drafter's children, given what precedes it."""


def flags() -> Namespace:
    """The flags: models, prompts and simulated costs."""
    parser = command_line("policies", (__doc__ or "").splitlines()[0])
    add_pair(parser)
    parser.add_argument(
        "--sets", nargs="+", choices=(*SETS, REPEATED), default=[*SETS, REPEATED], help="sets of prompts"
    )
    parser.add_argument("--count", type=int, default=6, help="number of prompts in a set, at most")
    parser.add_argument("--tokens", type=int, default=48, help="new tokens per prompt")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 0.8], help="one or more")
    parser.add_argument(
        "--drafter-step", type=float, nargs="+", default=[0.95, 2.5], help="ms of a drafter pass; one or more"
    )
    parser.add_argument("--drafter-row", type=float, default=SCENE.drafter_row, help="ms of a further row")
    parser.add_argument("--target-step", type=float, default=SCENE.target_step, help="ms of a target pass")
    parser.add_argument("--target-row", type=float, default=SCENE.target_row, help="ms of a further row")
    parser.add_argument("--depths", type=int, nargs="+", default=list(DEPTHS), help="fixed depths to compare")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), help="policies to compare")
    return parser.parse_args()


def prompt_sets(args: Namespace, target: PackedLM, drafter: CausalLMDrafter) -> Iterable[PromptSet]:
    """Each set of prompts at each temperature."""
    for name in args.sets:
        questions = _questions(name, args)
        for temperature in args.temperature:
            params = SamplingParams(temperature=temperature)
            truths = tuple(
                truth
                for seed, turns in enumerate(questions)
                for truth in answers_of(target, turns, params, seed, args.tokens)
            )
            right = tuple(_right(drafter, truth) for truth in truths)
            yield PromptSet(f"{name} {temperature:g}", truths, right)


def _questions(name: str, args: Namespace) -> list[tuple[str, ...]]:
    """The turns of each request of a set."""
    if name == REPEATED:
        return [(repeated(record["prompt"]),) for record in held_out_records(args.count)]
    return [question.turns for question in prompt_set(name, args.target, args.count).questions]


def answers_of(
    target: PackedLM, turns: Sequence[str], params: SamplingParams, seed: int, tokens: int
) -> list[Truth]:
    """The target's answer to each turn, the earlier turns and their answers before it."""
    tokenizer = Tokenizer.from_str(target.tokenizer_json or "")
    truths: list[Truth] = []
    texts: list[str] = []
    for number in range(1, len(turns) + 1):
        prompt = tokenizer.encode(plain(turns[:number], texts)).ids
        truths.append(continuation(target, prompt, params, seed, tokens))
        texts.append(tokenizer.decode(truths[-1].ids[len(prompt) :]))
    return truths


def _right(drafter: CausalLMDrafter, truth: Truth) -> tuple[bool, ...]:
    """Whether each token of an answer is among the drafter's children, in one pass over the answer."""
    begin, ids = truth.prompt_length, truth.ids
    ranker = ChildRanker(
        truth.params,
        truth.seed,
        ids[:begin],
        begin,
        width=drafter.abilities.width,
        bound=drafter.abilities.bound,
        children=GROWTH.children,
        scale=GROWTH.scale,
    )
    table = drafter.lm.table()
    rows = SequenceRows(table, ids[:-1], range(-1, len(ids) - 2), range(begin - 1, len(ids) - 1))
    logits = drafter.lm.forward([rows]).rows()
    drafter.lm.release(table)
    found = []
    for row, position in zip(logits, range(begin, len(ids)), strict=True):
        children = ranker.children(HostDigest(row), position, ())
        found.append(ids[position] in {token for token, _ in children})
        ranker.push(ids[position])
    return tuple(found)


def run(
    drafter: CausalLMDrafter, answers: PromptSet, scene: Scene, policy_of: Callable[[int], DraftPolicy]
) -> dict[str, float]:
    """Simulates a set under the policy that `policy_of` gives for each of its prompts."""
    tally, learnt = Tally(), SurvivalCurve()
    for number, truth in enumerate(answers.truths):
        Simulation(drafter, truth, GROWTH, scene, tally, policy_of(number), [SurvivalCurve(learnt)]).run()
    found = tally.summary()
    return {name: found[name] for name in ("tokens_per_second", "acceptance_length", "drafted_per_token")}


def compared(args: Namespace, drafter: CausalLMDrafter, answers: PromptSet, scene: Scene) -> dict[str, Any]:
    """All policies, all fixed depths and the oracle over one set at one price of a drafter pass."""

    def under(name: str) -> dict[str, float]:
        book = PolicyBook(name, GROWTH.limits)  # one for the set: some policies learn from prompt to prompt
        return run(drafter, answers, scene, lambda _: book.open())

    fixed = {str(depth): under(f"fixed:{depth}") for depth in args.depths}
    policies = {name: under(name) for name in args.policies}
    oracle = run(drafter, answers, scene, lambda number: OracleDepth(GROWTH.limits, answers.right[number]))
    best = max(fixed, key=lambda depth: fixed[depth]["tokens_per_second"])
    most = fixed[best]["tokens_per_second"]
    for measured in (*policies.values(), oracle):
        measured["over_best_fixed"] = round(measured["tokens_per_second"] / most, 3)
    return {
        "set": answers.name,
        "drafter_step": scene.drafter_step,
        "best_fixed_depth": int(best),
        "fixed": fixed,
        "policies": policies,
        "oracle": oracle,
    }


def main() -> None:
    """Compares the policies on each set at each price and prints the result."""
    args, started = flags(), time.perf_counter()
    target = PackedLM.load(args.target, check=False)
    drafter = CausalLMDrafter(PackedLM.load(args.drafter, check=False))
    prices = Scene(target_step=args.target_step, target_row=args.target_row, drafter_row=args.drafter_row)
    rows = [
        compared(args, drafter, answers, replace(prices, drafter_step=step))
        for answers in prompt_sets(args, target, drafter)
        for step in args.drafter_step
    ]
    least = {name: min(row["policies"][name]["over_best_fixed"] for row in rows) for name in args.policies}
    settings = settings_of(args) | {"growth": asdict(GROWTH), "scene": asdict(prices)}
    print_result(
        "policies",
        settings,
        started,
        {"default": DEFAULT_POLICY, "rows": rows, "least_over_best_fixed": least},
    )


if __name__ == "__main__":
    main()
