"""Tiny random-weight models of the families that the packed pass is held to."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from outrider.lm.kv.blocks import BLOCK
from outrider.lm.kv.table import SlotTable
from outrider.lm.load.check import Trial
from outrider.lm.plan import SequenceRows
from outrider.lm.runner import PackedLM

torch.set_num_threads(1)

VOCABULARY = 61
LENGTH = 96
WINDOW = 8
"""Sliding window: shorter than every context that the tests use."""

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": LENGTH,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    # A tied head makes many random models repeat their last id.
    "tie_word_embeddings": False,
}
_LOCAL_AND_GLOBAL = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]

_MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 8,
}
_DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_OLD = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": LENGTH}

_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {}),
    "mistral": ("MistralConfig", {"sliding_window": WINDOW}),
    "gemma3_text": ("Gemma3TextConfig", {"sliding_window": WINDOW, "layer_types": _LOCAL_AND_GLOBAL}),
    "gemma2": ("Gemma2Config", {"sliding_window": WINDOW, "attn_logit_softcapping": 2.0}),
    "gpt_neox": ("GPTNeoXConfig", {}),
    "gpt_oss": (
        "GptOssConfig",
        {
            "sliding_window": WINDOW,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": _LOCAL_AND_GLOBAL,
        },
    ),
    "gpt2": ("GPT2Config", {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": LENGTH}),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 12,
            "moe_intermediate_size": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "falcon": ("FalconConfig", {"head_dim": None}),
    "jamba": (
        "JambaConfig",
        {"num_experts": 1, "mamba_d_state": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    ),
    "mamba": ("MambaConfig", {"state_size": 4, "max_position_embeddings": None}),
    "mamba2": (
        "Mamba2Config",
        {
            "state_size": 8,
            "num_heads": 8,
            "head_dim": 8,
            "n_groups": 2,
            "chunk_size": 8,
            "max_position_embeddings": None,
        },
    ),
    "falcon_mamba": ("FalconMambaConfig", {"state_size": 4}),
    "bamba": ("BambaConfig", {**_MAMBA2, "attn_layer_indices": [1, 3]}),
    "falcon_h1": ("FalconH1Config", {**_MAMBA2, "mamba_d_ssm": 64}),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        {
            **_MAMBA2,
            "layer_types": ["mamba", "attention"] * 2,
            "num_local_experts": 0,
            "shared_intermediate_size": 48,
        },
    ),
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention"] * 2}),
    "nemotron_h": (
        "NemotronHConfig",
        {
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "n_groups": 2,
            "chunk_size": 8,
            "hybrid_override_pattern": "M*M-",
        },
    ),
    "qwen3_5_text": ("Qwen3_5TextConfig", _DELTA_NET),
    "mpt": ("MptConfig", {"d_model": 32, "n_heads": 4, "n_layers": 4, "max_seq_len": LENGTH}),
    "gptj": ("GPTJConfig", {**_OLD, "rotary_dim": 4}),
    "codegen": ("CodeGenConfig", {**_OLD, "rotary_dim": 4}),
    "gpt_neo": (
        "GPTNeoConfig",
        {
            "num_layers": 4,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 2]],
            "window_size": WINDOW,
        },
    ),
    "llama4_text": (
        "Llama4TextConfig",
        {"attention_chunk_size": WINDOW, "num_local_experts": 2, "intermediate_size_mlp": 48},
    ),
    "phimoe": (
        "PhimoeConfig",
        {"sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "recurrent_gemma": ("RecurrentGemmaConfig", {"lru_width": 32, "attention_window_size": WINDOW}),
    "qwen3_next": (
        "Qwen3NextConfig",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            **_DELTA_NET,
        },
    ),
    "bert": ("BertConfig", {}),
    "bloom": ("BloomConfig", {}),
    "t5": ("T5Config", {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}),
}


def config_of(family: str, **changes: Any) -> transformers.PreTrainedConfig:
    """A tiny config of the family."""
    name, own = _FAMILIES[family]
    wanted = {**_SHAPE, **own, **changes}
    return getattr(transformers, name)(**{key: value for key, value in wanted.items() if value is not None})


def model_of(family: str, *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A tiny model with weights wide enough that its choices depend on the whole context."""
    config = config_of(family, **changes)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(0.0, 0.2)
            else:
                parameter.data.add_(0.1 * torch.randn_like(parameter))
    return model.requires_grad_(False)


def twin_of(model: PreTrainedModel) -> PreTrainedModel:
    """A copy that stays as transformers has it while a packed pass takes over the first."""
    return copy.deepcopy(model)


def check_pass(lm: PackedLM) -> None:
    """The check at load. Raises ModelRefused unless packed passes equal the model's own eager forward."""
    Trial.of(lm).verify(lm)


def logits_of(lm: PackedLM, sequences: Sequence[SequenceRows]) -> torch.Tensor:
    """Float32 logits of the wanted rows of one pass."""
    return torch.from_numpy(lm.forward(sequences).rows()).clone()


def branched(lm: PackedLM, table: SlotTable, ids: Sequence[int]) -> SlotTable:
    """A second session of the ids committed in ``table``: adopts its full blocks, computes the rest."""
    other = lm.table()
    full = len(ids) // BLOCK
    other.adopt(table.blocks[:full])
    if rest := ids[full * BLOCK :]:
        lm.forward([SequenceRows(other, rest, range(-1, len(rest) - 1), ())])
        other.commit(range(len(rest)))
    return other


def greedy_ids(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """transformers' own ``generate``, greedy: the new ids."""
    ids = torch.tensor([prompt])
    if model.generation_config is not None:
        model.generation_config.eos_token_id = None  # some families end at an id of their own
    made = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
    )
    return made[0, len(prompt) :].tolist()


def eager_logits(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """Logits after every id, by transformers' own forward without a cache."""
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
