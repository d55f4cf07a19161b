"""Milliseconds of one step on a GPU beside the least that its memory and arithmetic allow, and equal ids.

Times steps of several sessions and trees on an 8B-shaped Llama with random bfloat16 weights: a session has a
pending row and a tree below it, sessions differ in length, and every step follows a commit that moved keys
and values. The floor is the larger of two times: that of the bytes that a step must move at the measured
copy bandwidth, and that of its products at the measured rate of a large product. Then compares the greedy
ids of a small model through trees with its plain ones, in float32 without TF32 and in bfloat16. Run as
`outrider bench gpu-step --json`; `--device cpu --tiny` runs the same code small. docs/figures/gpu_step.md
says what each field means.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.shared.envelope import command_line, print_result
from benchmarks.shared.random_llama import (
    EIGHT_BILLION,
    PREFILL_CHUNK,
    TINY,
    LlamaSize,
    TimedDevice,
    packed_llama,
    prefilled,
    random_llama,
    static_steps,
)
from outrider.lm import transfer
from outrider.lm.device.layout import DigestLevel
from outrider.lm.graphs.backend_choice import use_ragged
from outrider.lm.graphs.capture import CudaGraphs
from outrider.lm.graphs.graph_runner import GraphRunner
from outrider.lm.graphs.layer_compiler import compile_layers
from outrider.lm.outcome import Outcome
from outrider.lm.plan import PassPlan, SequenceRows
from outrider.lm.runner import PackedLM
from speculative.choice import choose_token
from speculative.digest import RowAsk
from speculative.history import History
from speculative.noise import PositionNoise
from speculative.params import SamplingParams

TREE_NODES = 8
"""Nodes of a drafted tree where ids are compared: a chain of four, each node after a wrong sibling."""
VISITED = 4
"""Rows of each session whose token is chosen in a timed step: the pending row and three accepted nodes."""
MOVED = 3
"""Slots of each session that a commit moves before a timed step."""
TEMPERATURE = 0.8
HISTORY = History.of([1], 1)


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """A model, and the batches and trees that are timed on it."""

    model: LlamaSize
    context: int
    """Mean number of committed tokens of a session; sessions have 50 to 150 % of it."""
    batches: tuple[int, ...]
    trees: tuple[int, ...]
    """Nodes of each session's tree; the session's pending row comes on top."""
    prompt: int
    """Rows of a prompt's chunk in the steps that carry one."""
    copied_mb: int
    product_width: int
    tokens: int
    """Tokens generated per prompt where ids are compared."""


FULL = BenchPlan(EIGHT_BILLION, 1024, (1, 8, 32), (0, 8, 32, 64), PREFILL_CHUNK, 2048, 8192, 256)
SMALL = BenchPlan(TINY, 64, (1, 2), (0, 4), 16, 8, 64, 24)
COMPARED = LlamaSize(512, 8, 8, 4, 1376, 4096)
"""Dimensions of the model whose ids are compared."""


class Floor(NamedTuple):
    """The least time of a step in milliseconds, by what bounds it."""

    bytes_ms: float
    arithmetic_ms: float

    @property
    def ms(self) -> float:
        """The larger of the two times."""
        return max(self)

    @property
    def bound(self) -> str:
        """What bounds the step: bytes or arithmetic."""
        return "bytes" if self.bytes_ms >= self.arithmetic_ms else "arithmetic"


@dataclass(frozen=True, slots=True)
class Roofline:
    """The least time of a step of one model on one device.

    Args:
        size: dimensions of the model.
        value_bytes: bytes of one weight, key or value.
        bytes_per_second: measured copy bandwidth.
        operations_per_second: measured rate of a large product.
    """

    size: LlamaSize
    value_bytes: int
    bytes_per_second: float
    operations_per_second: float

    @property
    def multiplied(self) -> int:
        """Number of weights that every row is multiplied with: all but the embedding and the norms."""
        size = self.size
        attention = size.hidden * size.head_width * 2 * (size.heads + size.key_heads)
        layer = attention + 3 * size.hidden * size.intermediate
        return size.layers * layer + size.hidden * size.vocabulary

    def floor(self, contexts: Sequence[int], rows: Sequence[int]) -> Floor:
        """The floor of a step that computes ``rows`` rows of sessions with ``contexts`` committed tokens.

        Weights and each session's context are read once; each row reads its embedding, and its keys and
        values are written and read.
        """
        size, count = self.size, sum(rows)
        values = self.multiplied + size.token_values * (sum(contexts) + 2 * count) + size.hidden * count
        seen = sum(new * (old + new) for old, new in zip(contexts, rows, strict=True))
        products = 2 * self.multiplied * count + 4 * size.layers * size.hidden * seen
        return Floor(
            values * self.value_bytes / self.bytes_per_second * 1e3,
            products / self.operations_per_second * 1e3,
        )


class StepBench:
    """Times steps of a model: in all, by part, and beside their floor."""

    def __init__(self, plan: BenchPlan, device: TimedDevice, dtype: torch.dtype, repeats: int) -> None:
        self._plan, self._device, self._repeats = plan, device, repeats
        most, size = max(plan.batches), plan.model
        lengths = [plan.context // 2 + plan.context * at // max(1, most - 1) for at in range(most)]
        room = sum(lengths) + (most + 1) * (max(plan.trees) + 2 * PREFILL_CHUNK)
        self.lm = packed_llama(random_llama(size, device.name, dtype), size, room)
        if device.is_gpu:  # as a service does at load
            self.lm.pack()
        self._steps: GraphRunner | None = None
        self.roofline = Roofline(
            size,
            dtype.itemsize,
            device.copied_bytes_per_second(plan.copied_mb, repeats),
            device.operations_per_second(plan.product_width, dtype, repeats),
        )
        generator = torch.Generator().manual_seed(1)
        self._tables = [
            prefilled(self.lm, torch.randint(size.vocabulary, (length,), generator=generator).tolist())
            for length in lengths
        ]
        self._reading = self.lm.table(reserve=plan.prompt)

    def compile_layers(self) -> None:
        """Compiles the model's layers on a GPU, as a service does at load."""
        if self._device.is_gpu:
            self.use_static()
            compile_layers(self.lm, None, "triton", CudaGraphs)
            self._steps = self.lm.steps

    def use_static(self) -> GraphRunner:
        """Makes passes static steps: always the same ones, so that what was compiled and captured is kept."""
        if self._steps is None:
            self._steps = static_steps(self.lm, self._device)
        elif self.lm.steps is None:
            self.lm.steps, self.lm.pool.deferred = self._steps, {}
        return self._steps

    def rows(self) -> list[dict[str, Any]]:
        """One result row per batch and tree."""
        return [self.row(batch, tree) for batch in self._plan.batches for tree in self._plan.trees]

    def row(self, batch: int, tree: int) -> dict[str, Any]:
        """Times of one batch and tree, and their floor."""
        ms = self._device.ms
        use_ragged(self.lm)
        ragged_ms = ms(self._step(batch, tree, 0.0), self._repeats)
        steps = self.use_static()
        step_ms, sampled_ms = (
            ms(self._step(batch, tree, temperature), self._repeats) for temperature in (0.0, TEMPERATURE)
        )
        with_prompt_ms = ms(self._step(batch, tree, 0.0, with_prompt=True), self._repeats)
        contexts, rows = [table.length for table in self._chosen(batch)], [tree + 1] * batch
        floor = self.roofline.floor(contexts, rows)
        prompt_floor = self.roofline.floor([*contexts, 0], [*rows, self._plan.prompt])
        return {
            "batch": batch,
            "tree": tree,
            "step_ms": round(step_ms, 3),
            "sampled_ms": round(sampled_ms, 3),
            "floor_ms": round(floor.ms, 4),
            "floor_by": floor.bound,
            "over_floor": round(step_ms / floor.ms, 3),
            "sampled_over_floor": round(sampled_ms / floor.ms, 3),
            "with_prompt_ms": round(with_prompt_ms, 3),
            "with_prompt_floor_ms": round(prompt_floor.ms, 4),
            "ragged_ms": round(ragged_ms, 3),
            **self._parts(steps, batch, tree),
        }

    def _chosen(self, batch: int) -> list[Any]:
        """The tables of a batch: spread over all lengths."""
        most = len(self._tables)
        return [self._tables[(2 * at + 1) * most // (2 * batch)] for at in range(batch)]

    def _shares(self, batch: int, tree: int, temperature: float) -> list[SequenceRows]:
        parents = [-1, *((node + 1) // 2 for node in range(tree))]
        rows = range(tree + 1)
        asks = [RowAsk(7, row, temperature) for row in rows]
        return [SequenceRows(table, rows, parents, rows, lambda: asks) for table in self._chosen(batch)]

    def _step(
        self, batch: int, tree: int, temperature: float, with_prompt: bool = False
    ) -> Callable[[], None]:
        """One step with all that serving does to the device: a pass, chosen tokens, and moved slots."""
        shares = self._shares(batch, tree, temperature)
        moved = min(MOVED, tree)
        given = list(shares)
        if with_prompt:
            count = self._plan.prompt
            given.append(SequenceRows(self._reading, [1] * count, range(-1, count - 1), ()))
        params = SamplingParams(temperature=temperature)

        def once() -> None:
            choose_all(self.lm.forward(given), batch, tree, params)
            for share in shares:
                table = share.table
                if moved:
                    # What a commit of nodes beside the first branch moves.
                    low, high = table.length, table.length + tree + 1
                    self.lm.pool.copy(table.slots(high - moved, high), table.slots(low, low + moved))
                table.drop_nodes()
            self._reading.drop_nodes()

        return once

    @torch.inference_mode()
    def _parts(self, steps: GraphRunner, batch: int, tree: int) -> dict[str, float]:
        """Milliseconds of a greedy step's three parts, each timed alone."""
        lm, device, repeats = self.lm, self._device, self._repeats
        shares = self._shares(batch, tree, 0.0)
        ids, wanted = [row for share in shares for row in share.tokens], range(batch * (tree + 1))

        def prepare() -> None:
            steps.prepare(PassPlan(shares, lm.pool, lm.model.dtype), ids, wanted)

        def fetch() -> None:
            digests = steps.results(shape, DigestLevel.PLAIN, len(ids), len(ids)).digests
            if digests is not None:
                transfer.download(digests)

        shape = steps.prepare(PassPlan(shares, lm.pool, lm.model.dtype), ids, wanted)
        return {
            "host_ms": round(device.ms(prepare, repeats), 3),
            "device_ms": round(device.ms(lambda: steps.replay(shape), repeats), 3),
            "digests_ms": round(device.ms(fetch, repeats), 3),
        }


def choose_all(outcome: Outcome, batch: int, tree: int, params: SamplingParams) -> None:
    """Chooses the tokens of the rows that each session visits."""
    for session in range(batch):
        for row in range(min(VISITED, tree + 1)):
            digest = outcome.digest(session * (tree + 1) + row)
            noise = PositionNoise(7, row, digest.vocabulary_size) if params.temperature else None
            choose_token(digest, params, HISTORY, noise)


class TreeExactness:
    """Compares greedy ids of a small model, decoded plainly and through trees with wrong branches."""

    def __init__(self, device: TimedDevice, dtype: torch.dtype, size: LlamaSize) -> None:
        self.lm = PackedLM(random_llama(size, device.name, dtype, seed=2), kv_mb=256)
        self._vocabulary = size.vocabulary
        static_steps(self.lm, device)

    def compare(self, prompts: int, tokens: int) -> dict[str, Any]:
        """Whether all ids are the same, and the margin of plain logits at each prompt's first difference."""
        generator = torch.Generator().manual_seed(3)
        differences = []
        for prompt in range(prompts):
            ids = torch.randint(self._vocabulary, (16 + 7 * prompt,), generator=generator).tolist()
            plain, logits = self._decode_plain(ids, tokens)
            found = self._decode_trees(ids, plain)
            apart = [at for at, pair in enumerate(zip(plain, found, strict=True)) if pair[0] != pair[1]]
            if apart:
                row = logits[apart[0]]
                margin = float(row[plain[apart[0]]] - row[found[apart[0]]])
                differences.append({"prompt": prompt, "position": apart[0], "margin": round(margin, 6)})
        return {
            "identical": not differences,
            "tokens": prompts * tokens,
            "first_differences": differences,
            "differing_per_1000": round(1000 * len(differences) / (prompts * tokens), 4),
        }

    def _decode_plain(self, prompt: Sequence[int], count: int) -> tuple[list[int], list[NDArray[np.float32]]]:
        table = prefilled(self.lm, prompt[:-1])
        ids, rows = [prompt[-1]], []
        for _ in range(count):
            logits = self.lm.forward([SequenceRows(table, ids[-1:], [-1], [0])]).row(0)
            table.commit([0])
            rows.append(logits.copy())
            ids.append(int(logits.argmax()))
        self.lm.release(table)
        return ids[1:], rows

    def _decode_trees(self, prompt: Sequence[int], plain: Sequence[int]) -> list[int]:
        """Ids decoded through trees whose right branch holds the plainly decoded ids."""
        table = prefilled(self.lm, prompt[:-1])
        ids = [prompt[-1]]
        while len(ids) <= len(plain):
            right = plain[len(ids) - 1 : len(ids) - 1 + TREE_NODES // 2]
            tokens, parents, parent = [ids[-1]], [-1], 0
            for token in right:
                tokens += [(token + 1) % self._vocabulary, token]
                parents += [parent, parent]
                parent = len(tokens) - 1
            logits = self.lm.forward([SequenceRows(table, tokens, parents, range(len(tokens)))]).rows()
            path = [0]
            while True:
                ids.append(int(logits[path[-1]].argmax()))
                below = [row for row, above in enumerate(parents) if above == path[-1] and row]
                match = [row for row in below if tokens[row] == ids[-1]]
                if not match:
                    break
                path += match
            table.keep(path)
        self.lm.release(table)
        return ids[1 : 1 + len(plain)]


def arguments() -> argparse.Namespace:
    """Parses the flags."""
    parser = command_line("gpu-step", __doc__)
    parser.add_argument("--device", default="cuda", help="the torch device (default cuda)")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and few steps, to try the program")
    parser.add_argument("--repeats", type=int, default=30, help="repeats of each step (default 30)")
    parser.add_argument("--prompts", type=int, default=16, help="prompts whose ids are compared (default 16)")
    return parser.parse_args()


def main() -> None:
    """Measures, prints a table to stderr and the result as the last line of stdout."""
    settings = arguments()
    if settings.device.startswith("cuda") and not torch.cuda.is_available():
        sys.exit("gpu-step: there is no CUDA device here; --device cpu --tiny tries the program without one")
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("highest")
    started = time.perf_counter()
    plan, device = SMALL if settings.tiny else FULL, TimedDevice(settings.device)
    compared = TINY if settings.tiny else COMPARED
    exact = {
        name: TreeExactness(device, dtype, compared).compare(settings.prompts, plan.tokens)
        for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16))
    }
    steps = StepBench(plan, device, torch.bfloat16, settings.repeats)
    steps.compile_layers()
    rows = steps.rows()
    columns = ("batch", "tree", "step_ms", "sampled_ms", "floor_ms", "floor_by", "over_floor", "ragged_ms")
    print("".join(f"{name:>12}" for name in columns), file=sys.stderr)
    for row in rows:
        print("".join(f"{row[name]:>12}" for name in columns), file=sys.stderr)
    roofline = steps.roofline
    fields = {
        "device": torch.cuda.get_device_name() if device.is_gpu else "cpu",
        "model": asdict(plan) | {"dtype": "bfloat16"},
        "copy_gb_per_second": round(roofline.bytes_per_second / 1e9, 3),
        "product_tflops": round(roofline.operations_per_second / 1e12, 4),
        "weight_bytes": roofline.multiplied * roofline.value_bytes,
        "steps": rows,
        "exactness": exact,
    }
    print_result("gpu_step", vars(settings) | {"torch": torch.__version__}, started, fields)


if __name__ == "__main__":
    main()
