"""Llamas of any size with random weights, made on the device that runs them, and clocks for their device.

Needs torch, transformers and numpy alone, so that it runs on a machine without the services' packages.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.lm.graphs.backend_choice import use_graphs
from outrider.lm.graphs.capture import CudaGraphs
from outrider.lm.graphs.graph_runner import GraphRunner
from outrider.lm.kv.table import SlotTable
from outrider.lm.plan import SequenceRows
from outrider.lm.runner import PackedLM

PREFILL_CHUNK = 256
_WARM_UP = 3


@dataclass(frozen=True, slots=True)
class LlamaSize:
    """Dimensions of a Llama."""

    hidden: int
    layers: int
    heads: int
    key_heads: int
    intermediate: int
    vocabulary: int

    @property
    def head_width(self) -> int:
        """Width of one attention head."""
        return self.hidden // self.heads

    @property
    def token_values(self) -> int:
        """Number of keys and values, over all layers, that one token leaves in the cache."""
        return 2 * self.layers * self.key_heads * self.head_width


EIGHT_BILLION = LlamaSize(4096, 32, 32, 8, 14336, 128256)
ONE_BILLION = LlamaSize(2048, 16, 32, 8, 8192, 128256)
TINY = LlamaSize(64, 2, 4, 2, 128, 512)


def random_llama(
    size: LlamaSize, device: str, dtype: torch.dtype, seed: int = 0, longest: int = 8192
) -> LlamaForCausalLM:
    """A Llama of this size with random weights, created on the device, for up to ``longest`` positions."""
    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.key_heads,
        max_position_embeddings=longest,
        tie_word_embeddings=False,
    )
    config._attn_implementation = "eager"
    before = torch.get_default_dtype()
    torch.manual_seed(seed)
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    model.eval()
    model.requires_grad_(False)
    return model


def packed_llama(model: LlamaForCausalLM, size: LlamaSize, tokens: int) -> PackedLM:
    """A PackedLM over this model with room for the keys and values of ``tokens`` tokens."""
    token_bytes = size.token_values * model.dtype.itemsize
    return PackedLM(model, kv_mb=tokens * token_bytes // 2**20 + 1)


def static_steps(lm: PackedLM, device: "TimedDevice") -> GraphRunner:
    """Makes a model run in static steps: captured with the Triton kernel on a GPU, plain torch elsewhere."""
    return use_graphs(lm, "triton", CudaGraphs()) if device.is_gpu else use_graphs(lm, "gathered")


def prefilled(lm: PackedLM, prompt: Sequence[int], chunk: int = PREFILL_CHUNK) -> SlotTable:
    """The slot table of a new session that has committed this prompt, in chunks of ``chunk`` rows."""
    table = lm.table(reserve=len(prompt) + chunk)
    for low in range(0, len(prompt), chunk):
        part = prompt[low : low + chunk]
        lm.forward([SequenceRows(table, part, range(-1, len(part) - 1), ())])
        table.commit(range(len(part)))
    return table


class TimedDevice:
    """A device whose work is timed."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_gpu = name.startswith("cuda")

    def settle(self) -> None:
        """Waits until the device has finished all work."""
        if self.is_gpu:
            torch.cuda.synchronize(self.name)

    def times_ms(self, once: Callable[[], object], repeats: int, warm_up: int = _WARM_UP) -> list[float]:
        """Milliseconds of each repeat of ``once``, from an idle device to an idle device."""
        times = []
        for turn in range(warm_up + repeats):
            self.settle()
            began = time.perf_counter()
            once()
            self.settle()
            if turn >= warm_up:
                times.append((time.perf_counter() - began) * 1e3)
        return times

    def ms(self, once: Callable[[], object], repeats: int) -> float:
        """Median milliseconds of ``once``, from an idle device to an idle device."""
        return median(self.times_ms(once, repeats))

    def copied_bytes_per_second(self, megabytes: int, repeats: int) -> float:
        """Copy bandwidth: bytes that a large copy reads and writes, per second."""
        source = torch.randint(127, (megabytes * 2**20,), dtype=torch.uint8, device=self.name)
        target = torch.empty_like(source)
        return 2 * source.numel() / (self.ms(lambda: target.copy_(source), repeats) / 1e3)

    def operations_per_second(self, width: int, dtype: torch.dtype, repeats: int) -> float:
        """Floating-point operations per second of the product of two square matrices of this width."""
        left, right = (torch.randn(width, width, device=self.name).to(dtype) for _ in range(2))
        return 2 * width**3 / (self.ms(lambda: left @ right, repeats) / 1e3)
