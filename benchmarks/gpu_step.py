"""Milliseconds of one step on a GPU beside its memory bandwidth's bound, and whether ids stay the same.

Times steps of several sessions and trees on an 8B-shaped Llama with random bfloat16 weights, and compares
them with the time that reading the weights, keys and values takes at the measured copy bandwidth. Then
compares the greedy ids of a small model through trees with its plain ones, in float32 without TF32 and in
bfloat16. Run as `outrider bench gpu-step --json`; `--device cpu --tiny` runs the same code small.
docs/figures.md says what each field means.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.shared.envelope import command_line, print_result
from outrider.lm import transfer
from outrider.lm.device.layout import DigestLevel
from outrider.lm.graphs.backend_choice import use_graphs, use_ragged
from outrider.lm.graphs.capture import CudaGraphs
from outrider.lm.graphs.graph_runner import GraphRunner
from outrider.lm.kv.table import SlotTable
from outrider.lm.plan import PassPlan, SequenceRows
from outrider.lm.runner import PackedLM

WARM_UP = 3
PREFILL_CHUNK = 256
TREE_NODES = 8
"""Nodes of a drafted tree where ids are compared: a chain of four, each node after a wrong sibling."""


@dataclass(frozen=True, slots=True)
class BenchSize:
    """The dimensions of a model, and the batches and trees that are timed on it."""

    hidden: int
    layers: int
    heads: int
    key_heads: int
    intermediate: int
    vocabulary: int
    context: int
    batches: tuple[int, ...]
    trees: tuple[int, ...]
    copied_mb: int
    tokens: int
    """Tokens generated per prompt where ids are compared."""


EIGHT_BILLION = BenchSize(4096, 32, 32, 8, 14336, 128256, 1024, (1, 8, 32), (1, 8, 32, 64), 2048, 256)
TINY = BenchSize(64, 2, 4, 2, 128, 512, 64, (1, 2), (1, 4), 8, 24)
SMALL = BenchSize(512, 8, 8, 4, 1376, 4096, 0, (), (), 0, 0)
"""Dimensions of the model whose ids are compared."""


class TimedDevice:
    """A device whose work is timed."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_gpu = name.startswith("cuda")

    def settle(self) -> None:
        """Waits until the device has finished all work."""
        if self.is_gpu:
            torch.cuda.synchronize()

    def ms(self, once: Callable[[], object], repeats: int) -> float:
        """Median milliseconds of `once`, from an idle device to an idle device."""
        times = []
        for turn in range(WARM_UP + repeats):
            self.settle()
            began = time.perf_counter()
            once()
            self.settle()
            if turn >= WARM_UP:
                times.append((time.perf_counter() - began) * 1e3)
        return median(times)

    def copied_bytes_per_second(self, megabytes: int, repeats: int) -> float:
        """Copy bandwidth: bytes that a large copy reads and writes, per second."""
        source = torch.randint(127, (megabytes * 2**20,), dtype=torch.uint8, device=self.name)
        target = torch.empty_like(source)
        return 2 * source.numel() / (self.ms(lambda: target.copy_(source), repeats) / 1e3)


def build(size: BenchSize, device: str, dtype: torch.dtype, seed: int = 0) -> LlamaForCausalLM:
    """A Llama of this size with random weights, created on the device that runs it."""
    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.key_heads,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
    )
    config._attn_implementation = "eager"
    before = torch.get_default_dtype()
    torch.manual_seed(seed)
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)
    return model.requires_grad_(False)


def static_steps(lm: PackedLM, device: TimedDevice) -> GraphRunner:
    """Makes a model run in static steps: captured with the Triton kernel on a GPU, plain torch elsewhere."""
    return use_graphs(lm, "triton", CudaGraphs()) if device.is_gpu else use_graphs(lm, "gathered")


def prefilled(lm: PackedLM, prompt: Sequence[int]) -> SlotTable:
    """The slot table of a new session that has committed this prompt."""
    table = lm.table(reserve=len(prompt) + PREFILL_CHUNK)
    for low in range(0, len(prompt), PREFILL_CHUNK):
        part = prompt[low : low + PREFILL_CHUNK]
        lm.forward([SequenceRows(table, part, range(-1, len(part) - 1), ())])
        table.commit(range(len(part)))
    return table


class StepBench:
    """Times steps of a model: in all, by part, and the least time that the memory bandwidth allows."""

    def __init__(self, size: BenchSize, device: TimedDevice, dtype: torch.dtype, repeats: int) -> None:
        self._size, self._device, self._repeats = size, device, repeats
        slots = max(size.batches) * (size.context + PREFILL_CHUNK + 16)
        head = size.hidden // size.heads
        self._slot_bytes = 2 * size.layers * size.key_heads * head * dtype.itemsize
        self._lm = PackedLM(build(size, device.name, dtype), kv_mb=slots * self._slot_bytes // 2**20 + 1)
        embedded = self._lm.model.get_input_embeddings().weight
        weights = sum(each.numel() * each.element_size() for each in self._lm.model.parameters())
        self.weight_bytes = weights - embedded.numel() * embedded.element_size()
        self.bandwidth = device.copied_bytes_per_second(size.copied_mb, repeats)
        generator = torch.Generator().manual_seed(1)
        self._tables = [
            prefilled(self._lm, torch.randint(size.vocabulary, (size.context,), generator=generator).tolist())
            for _ in range(max(size.batches))
        ]

    def rows(self) -> list[dict[str, Any]]:
        """One result row per batch and tree."""
        return [self._row(batch, tree) for batch in self._size.batches for tree in self._size.trees]

    def _row(self, batch: int, tree: int) -> dict[str, Any]:
        use_ragged(self._lm)
        ragged_ms = self._device.ms(self._pass(batch, tree), self._repeats)
        steps = static_steps(self._lm, self._device)
        step_ms = self._device.ms(self._pass(batch, tree), self._repeats)
        # A session's context is read once; each row reads an embedding and writes keys and values.
        read = self.weight_bytes + batch * (self._size.context + tree) * self._slot_bytes
        written = batch * tree * (self._slot_bytes + self._embedding_bytes())
        floor_ms = (read + written) / self.bandwidth * 1e3
        return {
            "batch": batch,
            "tree": tree,
            "step_ms": round(step_ms, 3),
            "floor_ms": round(floor_ms, 4),
            "over_floor": round(step_ms / floor_ms, 3),
            "ragged_ms": round(ragged_ms, 3),
            **self._parts(steps, batch, tree),
        }

    def _embedding_bytes(self) -> int:
        return self._size.hidden * self._lm.model.dtype.itemsize

    def _shares(self, batch: int, tree: int) -> list[SequenceRows]:
        parents = [(row + 1) // 2 - 1 for row in range(tree)]
        return [SequenceRows(table, range(tree), parents, range(tree)) for table in self._tables[:batch]]

    def _pass(self, batch: int, tree: int) -> Callable[[], None]:
        shares = self._shares(batch, tree)

        def once() -> None:
            self._lm.forward(shares)
            for share in shares:
                share.table.drop_nodes()

        return once

    @torch.inference_mode()
    def _parts(self, steps: GraphRunner, batch: int, tree: int) -> dict[str, float]:
        """Milliseconds of a step's three parts, each timed alone."""
        lm, device, repeats = self._lm, self._device, self._repeats
        shares = self._shares(batch, tree)
        ids, wanted = [row for share in shares for row in share.tokens], range(batch * tree)

        def prepare() -> None:
            steps.prepare(PassPlan(shares, lm.pool, lm.model.dtype), ids, wanted)

        def fetch() -> None:
            digests = steps.results(shape, DigestLevel.PLAIN, batch * tree, batch * tree).digests
            if digests is not None:
                transfer.download(digests)

        shape = steps.prepare(PassPlan(shares, lm.pool, lm.model.dtype), ids, wanted)
        return {
            "host_ms": round(device.ms(prepare, repeats), 3),
            "device_ms": round(device.ms(lambda: steps.replay(shape), repeats), 3),
            "digests_ms": round(device.ms(fetch, repeats), 3),
        }


class TreeExactness:
    """Compares greedy ids of a small model, decoded plainly and through trees with wrong branches."""

    def __init__(self, device: TimedDevice, dtype: torch.dtype, size: BenchSize) -> None:
        self._lm = PackedLM(build(size, device.name, dtype, seed=2), kv_mb=256)
        self._vocabulary = size.vocabulary
        static_steps(self._lm, device)

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
        table = prefilled(self._lm, prompt[:-1])
        ids, rows = [prompt[-1]], []
        for _ in range(count):
            logits = self._lm.forward([SequenceRows(table, ids[-1:], [-1], [0])]).row(0)
            table.commit([0])
            rows.append(logits.copy())
            ids.append(int(logits.argmax()))
        self._lm.release(table)
        return ids[1:], rows

    def _decode_trees(self, prompt: Sequence[int], plain: Sequence[int]) -> list[int]:
        """Ids decoded through trees whose right branch holds the plainly decoded ids."""
        table = prefilled(self._lm, prompt[:-1])
        ids = [prompt[-1]]
        while len(ids) <= len(plain):
            right = plain[len(ids) - 1 : len(ids) - 1 + TREE_NODES // 2]
            tokens, parents, parent = [ids[-1]], [-1], 0
            for token in right:
                tokens += [(token + 1) % self._vocabulary, token]
                parents += [parent, parent]
                parent = len(tokens) - 1
            logits = self._lm.forward([SequenceRows(table, tokens, parents, range(len(tokens)))]).rows()
            path = [0]
            while True:
                ids.append(int(logits[path[-1]].argmax()))
                below = [row for row, above in enumerate(parents) if above == path[-1] and row]
                match = [row for row in below if tokens[row] == ids[-1]]
                if not match:
                    break
                path += match
            table.keep(path)
        self._lm.release(table)
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
    size, device = TINY if settings.tiny else EIGHT_BILLION, TimedDevice(settings.device)
    compared = TINY if settings.tiny else SMALL
    exact = {
        name: TreeExactness(device, dtype, compared).compare(settings.prompts, size.tokens)
        for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16))
    }
    steps = StepBench(size, device, torch.bfloat16, settings.repeats)
    rows = steps.rows()
    print(f"{'batch':>6}{'tree':>6}{'ms':>10}{'floor':>10}{'/ floor':>9}{'ragged':>10}", file=sys.stderr)
    for row in rows:
        print(
            f"{row['batch']:>6}{row['tree']:>6}{row['step_ms']:>10.3f}{row['floor_ms']:>10.4f}"
            f"{row['over_floor']:>9.2f}{row['ragged_ms']:>10.3f}",
            file=sys.stderr,
        )
    fields = {
        "device": torch.cuda.get_device_name() if device.is_gpu else "cpu",
        "model": asdict(size) | {"dtype": "bfloat16"},
        "copy_gb_per_second": round(steps.bandwidth / 1e9, 3),
        "weight_bytes": steps.weight_bytes,
        "steps": rows,
        "exactness": exact,
    }
    print_result("gpu_step", vars(settings) | {"torch": torch.__version__}, started, fields)


if __name__ == "__main__":
    main()
