"""The models and GPUs that the examples of values name: sizes as published, nothing downloaded."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen3Config

from outrider.lm.device.memory import kv_bytes, run_largest
from outrider.lm.device.placement import GpuOptions
from outrider.lm.heads.config import HeadConfig
from outrider.lm.heads.eagle3 import Eagle3Head
from outrider.lm.heads.target_parts import TargetParts, TargetShape
from outrider.lm.kv.pool import GuestRoom
from tests.gpu.fake_cuda import FakeModel
from tests.gpu.live_memory import LiveMemory

GIB = 2**30
CONTEXT = GIB
"""What the driver and torch's libraries take of a GPU for each process, generously."""

CARDS = {"NVIDIA-H100-80GB-HBM3": 79.0, "NVIDIA-L40S": 44.0, "NVIDIA-L4": 21.9, "nvidia.com/mig-1g.10gb": 9.5}
"""Memory that torch sees, in GiB, rounded down; by the node's label or by the resource of a part."""

_QWEN3 = {"vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960}
_LLAMA3 = {"vocab_size": 128256, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072}
_SHAPE = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def _of(kind: type[PreTrainedConfig], common: dict[str, Any], *shape: int, tied: bool) -> PreTrainedConfig:
    return kind(**common, **dict(zip(_SHAPE, shape, strict=True)), tie_word_embeddings=tied)


MODELS = {
    "Qwen3-0.6B": (_of(Qwen3Config, _QWEN3, 1024, 3072, 28, 16, tied=True), 0.596e9),
    "Qwen3-8B": (_of(Qwen3Config, _QWEN3, 4096, 12288, 36, 32, tied=False), 8.19e9),
    "Qwen3-14B": (_of(Qwen3Config, _QWEN3, 5120, 17408, 40, 40, tied=False), 14.77e9),
    "Llama-3.1-8B-Instruct": (_of(LlamaConfig, _LLAMA3, 4096, 14336, 32, 32, tied=False), 8.03e9),
    "Llama-3.3-70B-Instruct": (_of(LlamaConfig, _LLAMA3, 8192, 28672, 80, 64, tied=False), 70.55e9),
}
"""Configuration and published number of parameters."""

SAME_SIZE = {"code-drafter": "Qwen3-0.6B", "prose-drafter": "Qwen3-0.6B"}
"""Folders of models that someone has fine-tuned, with the model that they were."""

HEADS = {
    "EAGLE3-LLaMA3.1-Instruct-8B": {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": 32000,
    }
}
"""What configurations of heads say beside the sizes of their layer, which are the target's."""


@dataclass(frozen=True)
class Footprint:
    """What one process takes of its GPU, in bytes."""

    weights: int
    buffers: int
    """What steps hold between passes."""
    step: int
    """What the largest step takes beside that while it runs."""
    slot: int
    """Keys and values of one token."""
    later: int = 0
    """What is made once keys and values have their memory: a head and the hidden states that it reads."""

    def kv_tokens(self, card: int, share: float, beside: int = 0) -> int:
        """Tokens for which `fit_pool` finds room on a GPU of which others hold ``beside`` bytes."""
        own = self.weights + self.buffers + self.step
        return kv_bytes(card, card - CONTEXT - beside - own, own, self.step, share) // self.slot


def model_of(name: str, ranks: int = 1) -> PreTrainedModel:
    """A model without its weights; of several ranks one rank's part, with all of the embeddings."""
    config = MODELS[SAME_SIZE.get(name, name)][0]
    shared = {f: getattr(config, f) // ranks for f in (*_SHAPE[1::2], "num_key_value_heads")}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            type(config)(**config.to_dict() | shared), dtype=torch.bfloat16
        )


def weight_bytes(model: torch.nn.Module) -> int:
    return sum(each.nbytes for each in (*model.parameters(), *model.buffers()))


@cache
def footprint(name: str, rows: int, ranks: int = 1, head: str = "") -> Footprint:
    """What a process takes whose largest step has ``rows`` rows, counted over fake tensors."""
    model = model_of(name, ranks)
    with pytest.MonkeyPatch.context() as patch:
        fake, live = FakeModel(model.config, patch, gpu=GpuOptions(max_rows=rows)), LiveMemory()
        with fake.counting(), live:
            run_largest(fake.lm)
        layout = fake.lm.pool.layout
    found = Footprint(weight_bytes(model), fake.buffers, live.peak, layout.slot_bytes)
    if not head:
        return found
    config = HeadConfig(head, Path(), model.config.to_dict() | HEADS[head])
    needs = Eagle3Head.needs(config, TargetShape.of(model.config))
    room, width = GuestRoom(needs.planes, len(needs.reads)), int(model.config.hidden_size)
    with torch.device("meta"):
        made = Eagle3Head.of(config, TargetParts.of(model), {}).to(torch.bfloat16)
    slot = layout.with_guest(room, width).slot_bytes
    later = weight_bytes(made) + rows * room.features * width * 2
    return Footprint(found.weights, found.buffers, found.step, slot, later)
