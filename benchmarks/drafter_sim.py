"""How much a drafter's tree gives, on a virtual clock: real models, the real follower and merge, no processes.

The target's own continuations are computed once; drafts never change them. Then a verifier that never waits and a
drafter that never stops run side by side in simulated time with given step costs, so that ways to grow trees can be
compared without noise from the machine. The last line is one JSON object.
"""

import argparse
import heapq
import itertools
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from drafter_service.draft_tree import Growth
from drafter_service.drafters.causal_lm import CausalLMDrafter
from drafter_service.follower import Follower, Request
from outrider.lm.packed import PackedLM
from outrider.lm.plan import Share
from speculative.hashing import prefix_hashes
from speculative.merge import DraftPool
from speculative.noise import NoiseRows
from speculative.params import SamplingParams
from speculative.sampling import History, choose
from speculative.tree import ROOT


@dataclass(frozen=True, slots=True)
class Costs:
    """Simulated milliseconds; a step of n rows takes `step + row * (n - 1)`."""

    target_step: float = 7.0
    target_row: float = 0.15
    drafter_step: float = 0.95
    drafter_row: float = 0.12
    between: float = 0.4
    """From one target step to the next."""
    way: float = 0.4
    """A message from one process to the other."""


TICK_MS = 0.1


@dataclass(slots=True)
class Run:
    """What one request cost."""

    tokens: int = 0
    rounds: int = 0
    rows: int = 0
    drafted: int = 0
    passes: int = 0
    bare_rounds: int = 0
    ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Truth:
    """A prompt and what the target says after it."""

    ids: tuple[int, ...]
    prompt_length: int
    params: SamplingParams
    seed: int


def continuation(lm: PackedLM, prompt: Sequence[int], params: SamplingParams, seed: int, count: int) -> Truth:
    """Plain decoding, one token at a time."""
    table, history = lm.table(len(prompt) + count), History.of(prompt, len(prompt))
    noise = NoiseRows(seed, lm.vocabulary_size)
    ids, fresh = list(prompt), list(prompt)
    while len(ids) < len(prompt) + count and ids[-1] not in lm.eos_ids:
        logits = lm.forward([Share(table, fresh, range(-1, len(fresh) - 1), [len(fresh) - 1])])
        table.commit(range(len(fresh)))
        fresh = [choose(logits[0].numpy(), params, history, None if params.greedy else noise.row(len(ids)))]
        history.push(fresh[0])
        ids += fresh
    lm.release(table)
    return Truth(tuple(ids), len(prompt), params, seed)


class Simulation:
    """One request: two actors, each with its own time; whoever is behind acts next."""

    def __init__(
        self, drafter: CausalLMDrafter, truth: Truth, growth: Growth, costs: Costs, args: argparse.Namespace
    ) -> None:
        self._drafter, self._truth, self._costs, self._args = drafter, truth, costs, args
        prompt = truth.ids[: truth.prompt_length]
        limit = len(truth.ids)
        width = drafter.abilities.width
        request = Request(
            epoch=1,
            ids=prompt,
            prompt_length=len(prompt),
            limit=limit,
            params=truth.params,
            seed=truth.seed,
            node_limit=args.in_flight,
            vocabulary_size=width,
        )
        self._follower = Follower(request, drafter.open(limit), drafter.abilities, growth)
        self._pool = DraftPool(prompt, epoch=1, vocabulary_size=width, limit=limit)
        self._hashes = prefix_hashes(truth.ids)
        self._drafts: list[tuple[float, int, object]] = []
        self._progress: list[tuple[float, int, int]] = []
        self._serial = itertools.count()
        self._told = len(prompt)
        self._waited_ms = 0.0
        self.run = Run()

    def finish(self) -> Run:
        """Runs to the request's end."""
        verifier_ms = drafter_ms = 0.0
        while self._pool.length < len(self._truth.ids):
            if drafter_ms < verifier_ms:
                drafter_ms = self._draft(drafter_ms, verifier_ms)
            else:
                verifier_ms = self._verify(verifier_ms)
        self._drafter.close(self._follower.cache)
        self.run.ms = verifier_ms
        return self.run

    def _draft(self, now: float, until: float) -> float:
        while self._progress and self._progress[0][0] <= now:
            length = heapq.heappop(self._progress)[2]
            ids = self._truth.ids[self._told : length]
            self._follower.progress(self._told, ids, int(self._hashes[length]))
            self._told = length
            self._send(now)
        rows = self._follower.plan(self._args.nodes_per_pass, 10_000)
        if rows is None:
            return min([until, *(at for at, _, _ in self._progress)])
        logits = self._drafter.forward([(self._follower.cache, rows)])
        self._follower.grow(rows, logits)
        self.run.passes += 1
        now += self._costs.drafter_step + self._costs.drafter_row * (len(rows.tokens) - 1)
        self._send(now)
        return now

    def _send(self, now: float) -> None:
        for fragment in self._follower.take_fragments():
            self.run.drafted += len(fragment)
            heapq.heappush(self._drafts, (now + self._costs.way, next(self._serial), fragment))

    def _verify(self, now: float) -> float:
        while self._drafts and self._drafts[0][0] <= now:
            self._pool.offer(heapq.heappop(self._drafts)[2])  # type: ignore[arg-type]
        tree = self._pool.best_tree(self._args.node_limit)
        if not len(tree) and self._waited_ms < self._args.patience_ms:
            self._waited_ms += TICK_MS
            return now + TICK_MS
        self._waited_ms = 0.0
        node, length = ROOT, self._pool.length
        while length < len(self._truth.ids) and (found := tree.children(node).get(self._truth.ids[length])) is not None:
            node, length = found, length + 1
        length = min(length + 1, len(self._truth.ids))
        run = self.run
        run.tokens += length - self._pool.length
        run.rounds += 1
        run.rows += 1 + len(tree)
        run.bare_rounds += len(tree) == 0
        self._pool.commit(self._truth.ids[self._pool.length : length])
        end = now + self._costs.target_step + self._costs.target_row * len(tree)
        heapq.heappush(self._progress, (end + self._costs.way, next(self._serial), length))
        return end + self._costs.between


def summary(runs: Sequence[Run]) -> dict[str, float]:
    """Over all requests."""
    tokens, rounds = sum(run.tokens for run in runs), sum(run.rounds for run in runs)
    return {
        "acceptance_length": round(tokens / rounds, 3),
        "tokens_per_second": round(1000 * tokens / sum(run.ms for run in runs), 1),
        "worst_acceptance_length": round(min(run.tokens / run.rounds for run in runs), 3),
        "median_acceptance_length": round(statistics.median(run.tokens / run.rounds for run in runs), 3),
        "target_rows_per_round": round(sum(run.rows for run in runs) / rounds, 2),
        "bare_rounds": round(sum(run.bare_rounds for run in runs) / rounds, 3),
        "drafted_per_token": round(sum(run.drafted for run in runs) / tokens, 2),
        "passes_per_round": round(sum(run.passes for run in runs) / rounds, 2),
    }


def main() -> None:
    """Reads the flags, simulates greedy and sampled decoding, prints a table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, default=Path("models/target"))
    parser.add_argument("--drafter", type=Path, default=Path("models/drafter"))
    parser.add_argument("--prompts", type=Path, default=Path("models/heldout.jsonl"))
    parser.add_argument("--count", type=int, default=8, help="prompts used")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens per prompt")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--children", type=int, default=Growth().children)
    parser.add_argument("--scale", type=float, default=Growth().scale)
    parser.add_argument("--floor", type=float, default=Growth().floor)
    parser.add_argument("--depth", type=int, default=Growth().depth)
    parser.add_argument("--nodes-per-pass", type=int, default=2)
    parser.add_argument("--node-limit", type=int, default=16, help="nodes that the verifier takes in one round")
    parser.add_argument("--patience-ms", type=float, default=2.5, help="wait for a first draft so long")
    parser.add_argument("--in-flight", type=int, default=64, help="nodes that the drafter may have in flight")
    args = parser.parse_args()
    growth = Growth(args.children, args.scale, args.floor, args.depth)
    costs = Costs()
    target = PackedLM.load(args.target, check=False)
    drafter = CausalLMDrafter(PackedLM.load(args.drafter, check=False))
    found = {}
    for temperature in args.temperature:
        params = SamplingParams(temperature=temperature)
        runs = []
        for number, line in enumerate(args.prompts.read_text().splitlines()[: args.count]):
            prompt = drafter.tokens.encode(json.loads(line)["prompt"])
            truth = continuation(target, prompt, params, number, args.tokens)
            runs.append(Simulation(drafter, truth, growth, costs, args).finish())
        found[f"{temperature:g}"] = summary(runs)
        print(f"temperature {temperature:g}: {found[f'{temperature:g}']}")
    print(json.dumps({"name": "drafter_sim", "growth": asdict(growth), "costs": asdict(costs), "by_temperature": found}))


if __name__ == "__main__":
    main()
