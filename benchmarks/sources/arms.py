"""Runs requests with each source alone, with all of them merged, and with all but one; arms take turns.

A verifier learns what a source is worth beside the others. So single sources, all sources, and all but one
have services of their own, which teach each other nothing. Plain decoding runs on the first two: the ratio of
its rates says how much the services themselves differ. Lookup, a part of the verifier of which no rest is
learnt, runs on the first two as well: merged sources are held against lookup by the same services.
"""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

from benchmarks.shared.figures import alternating_orders
from benchmarks.shared.process_time import processor_s
from benchmarks.shared.services import UpServices
from benchmarks.sources.prompt_sets import PromptSet
from benchmarks.spec_bench.turns import TurnAsker, plain
from outrider.client import Client
from outrider.wire.names import REFERENCES

PLAIN, MERGED, PLAIN_BESIDE_MERGED = "plain", "merged", "plain_beside_merged"
LOOKUP, LOOKUP_BESIDE_MERGED = "lookup", "lookup_beside_merged"
BESIDE_MERGED = {PLAIN: PLAIN_BESIDE_MERGED, LOOKUP: LOOKUP_BESIDE_MERGED}
"""Arms that run on the services of the merged sources too, with the names that they have there."""
ROLES = ("verifier", "drafter", "retrieval")
"""Roles whose processor time is measured."""
Turns = list[dict[str, Any]]
Runs = dict[tuple[int, int], Turns]
"""Turns of one arm by number of question and repeat."""
_NODES = "outrider_spec_decode_num_draft_tokens_total"
_OWN = "outrider_spec_decode_num_own_tokens_total"
_SLOWDOWN = "outrider_verifier_source_slowdown"


class Stack(NamedTuple):
    """Running services and a client of theirs."""

    services: UpServices
    client: Client


class Stacks(NamedTuple):
    """Services that learn about their sources apart from each other."""

    alone: Stack
    """For plain decoding and single sources."""
    together: Stack
    """For all sources merged."""
    reduced: Stack
    """For all sources but one."""


class Arm(NamedTuple):
    """Where an arm's requests go, and which sources draft for them; none: plain decoding."""

    stack: Stack
    sources: tuple[str, ...]


class SourceCounts(NamedTuple):
    """What a verifier has counted of one source."""

    nodes: int
    """Drafted nodes that the target computed."""
    own: int
    """Accepted tokens that no better source had drafted."""


@dataclass(slots=True)
class CellRuns:
    """Everything that ran for one set at one temperature."""

    by_arm: dict[str, Runs] = field(default_factory=dict)
    processor_s: dict[str, Counter[str]] = field(default_factory=dict)
    """Processor time of each arm's services in all runs of `by_arm`, by role."""
    without: dict[str, Runs] = field(default_factory=dict)
    """Runs of all sources but one, by the name of the one that was left out."""
    counts: dict[str, SourceCounts] = field(default_factory=dict)
    """Counts of the merged runs of the last repeat, by source."""
    slowdown: dict[str, float] = field(default_factory=dict)
    """Part of the target's speed that each source takes, as the merged services measured by then."""


class SourceRuns:
    """Runs of one set of prompts at one temperature.

    Args:
        sources: names of the sources; `references` only drafts where the set has them.
        tokens: the most tokens of an answer.
    """

    def __init__(
        self,
        stacks: Stacks,
        prompts: PromptSet,
        temperature: float,
        sources: Sequence[str],
        tokens: int,
    ) -> None:
        self.prompts, self.temperature = prompts, temperature
        self.sources = tuple(name for name in sources if prompts.edit or name != REFERENCES)
        self.cell = CellRuns()
        self._together = stacks.together.services
        self._arms = {
            PLAIN: Arm(stacks.alone, ()),
            **{name: Arm(stacks.alone, (name,)) for name in self.sources},
            MERGED: Arm(stacks.together, self.sources),
            PLAIN_BESIDE_MERGED: Arm(stacks.together, ()),
        }
        if LOOKUP in self.sources:
            self._arms[LOOKUP_BESIDE_MERGED] = Arm(stacks.together, (LOOKUP,))
        several = self.sources if len(self.sources) > 1 else ()
        self._without = {
            name: Arm(stacks.reduced, tuple(other for other in self.sources if other != name))
            for name in several
        }
        self._askers = {
            stack.client: TurnAsker(stack.client, plain, tokens, temperature, edit=prompts.edit)
            for stack in stacks
        }

    def warm_up(self) -> None:
        """Runs every arm on the first request, untimed."""
        for arm in (*self._arms.values(), *self._without.values()):
            self._ask(arm, 0)

    def forget(self) -> None:
        """Forgets all runs so far; the services keep what they have learnt."""
        self.cell = CellRuns()

    def repeat(self, number: int, *, is_last: bool) -> None:
        """Runs every arm on every request once more, in alternating order (ABBA).

        All sources but one run in the last repeat alone, when verifiers know their sources, beside the merged
        runs that they are compared with.
        """
        orders = islice(alternating_orders(self._arms), number, None)
        for at, question in enumerate(self.prompts.questions):
            for name in next(orders):
                before = self._counts() if name == MERGED and is_last else {}
                turns = self._metered(name, at)
                self.cell.by_arm.setdefault(name, {})[question.number, number] = turns
                self._count(before)
            for name, arm in self._without.items() if is_last else ():
                self.cell.without.setdefault(name, {})[question.number, number] = self._ask(arm, at)
        read = self._together.metric_sum
        self.cell.slowdown = {name: read("verifier", _SLOWDOWN, source=name) for name in self.sources}
        print(f"{self.prompts.name} at {self.temperature:g}: repeat {number + 1}", file=sys.stderr)

    def _metered(self, name: str, at: int) -> Turns:
        """An arm's answer; notes the processor time of its services."""
        arm = self._arms[name]
        before = _processor_s(arm.stack.services)
        turns = self._ask(arm, at)
        spent = _processor_s(arm.stack.services)
        spent.subtract(before)
        self.cell.processor_s.setdefault(name, Counter()).update(spent)
        return turns

    def _ask(self, arm: Arm, at: int) -> Turns:
        question = self.prompts.questions[at]
        return self._askers[arm.stack.client].answer(question, arm.sources, question.number)

    def _counts(self) -> dict[str, SourceCounts]:
        read = self._together.metric_sum
        return {
            name: SourceCounts(
                int(read("verifier", _NODES, source=name)), int(read("verifier", _OWN, source=name))
            )
            for name in self.sources
        }

    def _count(self, before: Mapping[str, SourceCounts]) -> None:
        for name, now in self._counts().items() if before else ():
            then, so_far = before[name], self.cell.counts.get(name, SourceCounts(0, 0))
            self.cell.counts[name] = SourceCounts(
                so_far.nodes + now.nodes - then.nodes, so_far.own + now.own - then.own
            )


def _processor_s(services: UpServices) -> Counter[str]:
    return Counter({role: sum(map(processor_s, services.pids(role))) for role in ROLES})
