"""Writes a Llama checkpoint of transformers as a GGUF file in float32 or bfloat16, which llama.cpp reads.

Run as `python -m benchmarks.peers.gguf_models FOLDER FILE.gguf`. Tokenizers of byte-level BPE only.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter, TokenType, get_tensor_name_map
from gguf.quants import quantize
from transformers import AutoModelForCausalLM

from benchmarks.shared.heldout import tokenizer_of


def write_gguf(model: Path, file: Path, *, bfloat16: bool = False) -> None:
    """Writes the model of a folder with its tokenizer; in `bfloat16`, vectors stay float32.

    Raises:
        ValueError: the model is no Llama, or the tokenizer is no byte-level BPE.
    """
    target = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    writer = GGUFWriter(file, "llama")
    try:
        _add_shape(writer, target.config)
        _add_tokenizer(writer, json.loads(tokenizer_of(model).to_str()), target.config)
        _add_tensors(writer, target, bfloat16)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def _add_shape(writer: GGUFWriter, config: Any) -> None:
    rope = config.rope_parameters
    if config.model_type != "llama" or rope["rope_type"] != "default" or config.attention_bias:
        raise ValueError(
            f"model_type {config.model_type!r}, rope_type {rope['rope_type']!r}: "
            "only a Llama with default rope and without biases can be converted"
        )
    writer.add_name(config.name_or_path)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def _add_tokenizer(writer: GGUFWriter, tokenizer: dict[str, Any], config: Any) -> None:
    model, split = tokenizer["model"], tokenizer["pre_tokenizer"]
    if model["type"] != "BPE" or not split or split["type"] != "ByteLevel" or not split["use_regex"]:
        raise ValueError(
            f"the tokenizer is {model['type']} over {split}; only byte-level BPE can be converted"
        )
    by_id = {id_: (token, TokenType.NORMAL) for token, id_ in model["vocab"].items()}
    for added in tokenizer["added_tokens"]:
        by_id[added["id"]] = (
            added["content"],
            TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED,
        )
    # llama.cpp has a token for every row of the embedding, checkpoints pad it.
    rows = [by_id.get(id_, (f"<|unused_{id_}|>", TokenType.UNUSED)) for id_ in range(config.vocab_size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([token for token, _ in rows])
    writer.add_token_types([kind for _, kind in rows])
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_add_bos_token(False)
    if config.eos_token_id is not None:
        writer.add_eos_token_id(config.eos_token_id)


def _add_tensors(writer: GGUFWriter, target: Any, bfloat16: bool) -> None:
    config = target.config
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in target.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        projection = name.split(".")[-2]
        if projection in heads:
            values = interleave_halves(values, heads[projection])
        values = np.ascontiguousarray(values)
        stored = GGMLQuantizationType.BF16 if bfloat16 and values.ndim > 1 else None
        if stored is not None:
            values = quantize(values, stored)
        if (known := names.get_name(name, (".weight",))) is None:
            raise SystemExit(f"llama.cpp has no name for the tensor {name}")
        writer.add_tensor(known, values, raw_dtype=stored)


def interleave_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """A projection's rows in llama.cpp's order: it rotates neighbouring dimensions of a head, not its halves.

    Args:
        weight: [heads * head width, hidden width].
    """
    rows, width = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, width).swapaxes(1, 2).reshape(rows, width)


def check_paths(folder: Path, file: Path) -> None:
    """Raises SystemExit where there is no model to read, or no place for the file; loads nothing."""
    if missing := [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]:
        raise SystemExit(f"{folder} is no folder of a model: it has no {' and no '.join(missing)}")
    if file.is_dir():
        raise SystemExit(f"{file} is a folder; name the GGUF file to write in it")
    if not file.parent.is_dir():
        raise SystemExit(f"{file} cannot be written: there is no folder {file.parent}; make it first")


def main() -> None:
    """Converts the model of a folder."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.gguf_models", description=__doc__)
    parser.add_argument("folder", type=Path, help="folder of the Llama checkpoint")
    parser.add_argument("file", type=Path, help="GGUF file to write")
    parser.add_argument("--bfloat16", action="store_true", help="keep matrices in bfloat16, not in float32")
    given = parser.parse_args()
    check_paths(given.folder, given.file)
    try:
        write_gguf(given.folder, given.file, bfloat16=given.bfloat16)
    except (OSError, ValueError) as error:
        raise SystemExit(f"{given.folder} cannot be converted to {given.file}: {error}") from error
    print(f"wrote {given.file}, {given.file.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
