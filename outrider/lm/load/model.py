"""Finds and loads a causal language model, and says clearly why a model cannot be loaded.

Reads Hugging Face folders and ids; a folder is never looked up on the network. Knows nothing about packed
passes.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.utils import logging as transformers_logging

from outrider.lm.device.placement import AUTO, DTYPES, find_dtype
from outrider.lm.load.quantised import UNNAMED, check_readable
from outrider.lm.load.source import ModelSource, first_line
from outrider.tokens import ChatTemplate
from speculative.errors import InvalidRequest, ModelRefused

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "spiece.model",
)
_SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_LENGTH_FIELDS = (
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "max_seq_len",
    "seq_length",
    "n_ctx",
)

_STATE_LAYERS = frozenset({"conv", "linear_attention", "hybrid", "hybrid_sliding"})
"""The library's names for kinds of layers that keep a state beside keys and values, or instead of them."""


@dataclass(frozen=True, slots=True)
class LoadedTokenizer:
    """The tokenizer beside a model."""

    json: str
    """``tokenizers`` JSON, without truncation and padding."""
    highest_id: int
    """Highest id that the tokenizer gives; -1 for an empty vocabulary."""
    chat: ChatTemplate | None = None
    """Chat template of the model, or None."""


def load_model(source: str, *, device: str, dtype: str, ranks: int = 1) -> PreTrainedModel:
    """Loads a model in evaluation mode, on ``device``, without gradients; of several ranks, this rank's part.

    ``source`` is a folder, or an id, ORG/NAME or ORG/NAME@REVISION. Quantised weights are read by the library
    that the model's configuration names.

    ``dtype`` may be ``auto``: the checkpoint's on a GPU, float32 on a CPU.

    Raises InvalidRequest if there is no model at ``source`` or the dtype is unknown, ModelRefused (naming the
    model type) for a kind of model that cannot be served.
    """
    if dtype not in (AUTO, *DTYPES):
        raise InvalidRequest(f"dtype {dtype!r} is not one of {', '.join((AUTO, *DTYPES))}")
    transformers_logging.disable_progress_bar()
    where = ModelSource.of(source)
    config = _config(where)
    where.check_whole()
    stored = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    split: dict[str, Any] = {}
    if ranks > 1:
        check_split(config, ranks)
        split["distributed_config"] = DistributedConfig(tp_plan="auto")
    quantised = _quantised(config)
    check_readable(source, quantised)
    if quantised and not split:
        # Quantised weights are made where they stay; some of the libraries refuse to move them later.
        split["device_map"] = {"": device}
    try:
        # The library's annotation leaves out the result that `output_loading_info` changes.
        load: Callable[..., Any] = AutoModelForCausalLM.from_pretrained
        model, report = load(
            where.name,
            config=config,
            dtype=DTYPES[find_dtype(dtype, torch.device(device), stored)],
            attn_implementation="eager",
            trust_remote_code=False,
            output_loading_info=True,
            **where.arguments,
            **split,
        )
    except ImportError as error:
        raise InvalidRequest(_lacking(source, quantised, error)) from error
    except Exception as error:
        kind = f" (its weights are quantised by {quantised})" if quantised else ""
        raise InvalidRequest(f"model {source!r}{kind} cannot be loaded: {first_line(error)}") from error
    if report["missing_keys"]:
        lacking = ", ".join(sorted(report["missing_keys"])[:3])
        raise InvalidRequest(
            f"model {source!r} lacks {len(report['missing_keys'])} of its weights: {lacking} …"
        )
    ready: PreTrainedModel = (model if split else model.to(device)).eval()
    return ready.requires_grad_(False)


def layers_with_states(source: str) -> list[str]:
    """Kinds of recurrent and convolutional layers that the model's config names; none: every layer attends.

    Reads no weights. Raises as `load_model` where there is no model, or none of a kind that can be served.
    """
    text = _config(ModelSource.of(source)).get_text_config()
    return sorted(_STATE_LAYERS & set(getattr(text, "layer_types", None) or ()))


def _quantised(config: PreTrainedConfig) -> str:
    """Name of the method by which the weights are quantised; empty for plain weights."""
    for one in (config, config.get_text_config()):
        found = getattr(one, "quantization_config", None)
        if found:
            method = found.get("quant_method") if isinstance(found, dict) else found.quant_method
            return str(getattr(method, "value", method) or UNNAMED)
    return ""


def _lacking(source: str, quantised: str, error: ImportError) -> str:
    """Error message for a library that is not installed."""
    if not quantised:
        return f"model {source!r} cannot be loaded: {first_line(error)}"
    return (
        f"model {source!r} has weights quantised by {quantised}, and what reads them is not installed here: "
        f"{first_line(error)}"
    )


def check_split(config: PreTrainedConfig, ranks: int) -> None:
    """Raises ModelRefused where transformers' plan does not split this model into ``ranks`` equal parts."""
    text = config.get_text_config()

    def refusal(why: str) -> ModelRefused:
        return ModelRefused(f"{text.model_type} is not served by {ranks} ranks: {why}", text.model_type)

    plan: dict[str, str] = getattr(text, "base_model_tp_plan", None) or {}
    if not plan:
        raise refusal("transformers has no tensor-parallel plan for it; run one process")
    if not any(style == "colwise" and "att" in name for name, style in plan.items()):
        return
    for field in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(text, field, None)
        if isinstance(heads, int) and heads % ranks:
            raise refusal(f"its {field} = {heads} do not divide by {ranks}")


def load_tokenizer(source: str) -> LoadedTokenizer | None:
    """Loads the tokenizer beside the model; None if there is none that ``tokenizers`` can express.

    Raises InvalidRequest where a folder's ``tokenizer.json`` cannot be read.
    """
    where = ModelSource.of(source)
    folder = Path(where.name)
    if folder.is_dir() and not any((folder / name).exists() for name in _TOKENIZER_FILES):
        return None
    _check_readable(folder / "tokenizer.json")
    try:
        tokenizer = AutoTokenizer.from_pretrained(where.name, trust_remote_code=False, **where.arguments)
    except (OSError, ValueError, ImportError):
        return None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    backend.no_truncation()
    backend.no_padding()
    ids = backend.get_vocab(with_added_tokens=True).values()
    return LoadedTokenizer(backend.to_str(), max(ids, default=-1), _chat_template(tokenizer))


def _chat_template(tokenizer: Any) -> ChatTemplate | None:
    """Chat template for conversations without tools, or None."""
    source = getattr(tokenizer, "chat_template", None)
    if isinstance(source, dict):
        source = source.get("default")
    if not source:
        return None
    named = tokenizer.special_tokens_map.items()
    tokens = {name: str(token) for name, token in named if name.endswith("_token")}
    response = getattr(tokenizer, "response_template", None)
    return ChatTemplate(source, tokens, json.dumps(response) if isinstance(response, dict) else "")


def _check_readable(path: Path) -> None:
    if path.exists():
        try:
            Tokenizer.from_file(str(path))
        except Exception as error:
            raise InvalidRequest(f"{path} cannot be read: {first_line(error)}") from error


def end_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """End-of-sequence ids of the generation config, else of the config; ascending, possibly none."""
    generation = getattr(model, "generation_config", None)
    ids = getattr(generation, "eos_token_id", None)
    if ids is None:
        ids = getattr(model.config.get_text_config(), "eos_token_id", None)
    if ids is None:
        return ()
    return tuple(sorted({ids} if isinstance(ids, int) else set(ids)))


def sampling_defaults(model: PreTrainedModel) -> dict[str, float]:
    """Sampling parameters that the generation config sets, by the names of SamplingParams; possibly none.

    The values are the checkpoint's own, and may be out of range.
    """
    generation = getattr(model, "generation_config", None)
    found = {name: getattr(generation, name, None) for name in _SAMPLING_FIELDS}
    return {name: value for name, value in found.items() if isinstance(value, int | float)}


def longest_context(config: PreTrainedConfig) -> int:
    """Largest number of positions that the model can serve.

    Rotary embeddings whose frequencies change with the longest position *in the batch* (dynamic, longrope)
    would let one session change another's output. Such models are served up to the length at which the change
    begins. Raises ModelRefused if the config names no length.
    """
    text = config.get_text_config()
    lengths = [
        value for name in _LENGTH_FIELDS if isinstance(value := getattr(text, name, None), int) and value > 0
    ]
    if not lengths:
        why = f"its config names no longest context ({', '.join(_LENGTH_FIELDS)})"
        raise ModelRefused(f"{text.model_type} is not served: {why}", text.model_type)
    for rope in _rope_parameters(text):
        if rope.get("rope_type") in ("dynamic", "longrope"):
            lengths.append(int(rope.get("original_max_position_embeddings") or lengths[0]))
    return min(lengths)


def _rope_parameters(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """The rotary settings of a config: one set, or one per kind of layer."""
    found = getattr(config, "rope_parameters", None)
    if not isinstance(found, dict):
        return []
    nested = [value for value in found.values() if isinstance(value, dict)]
    return [found, *nested]


def _config(source: ModelSource) -> PreTrainedConfig:
    raw = source.read_config()
    model_type = str(raw.get("model_type", "unknown"))

    def refusal(why: str) -> ModelRefused:
        return ModelRefused(f"{model_type} is not served: {why}", model_type)

    if model_type not in CONFIG_MAPPING:
        if "auto_map" in raw:
            raise refusal("it needs code from its own repository")
        raise refusal("this transformers does not know it")
    config = CONFIG_MAPPING[model_type].from_dict(raw)
    if config.is_encoder_decoder:
        raise refusal("it is an encoder-decoder")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise refusal("it has no causal language model")
    return config
