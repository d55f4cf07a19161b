"""python -m training.evaluate TARGET DRAFTER --heldout FILE: measures a pair, prints one JSON object."""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from training import prompts, tokenizer

CONTEXT = 256
STEPS = 20
ROUNDS = 30
NEW_TOKENS = 128
WIDTHS = (1, 2, 4)


def main(arguments: Sequence[str] | None = None) -> None:
    """Loads both models in float32 on one thread, measures them, and prints the result as the last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("drafter", type=Path)
    parser.add_argument("--heldout", type=Path, required=True, help="JSON lines with prompt and continuation")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    bpe = tokenizer.load(options.target / "tokenizer.json")
    texts = prompts.read(options.heldout)
    target, drafter = load(options.target), load(options.drafter)
    whole = [text.prompt + text.continuation for text in texts]
    result = {
        "held_out": {"target": loss(target, bpe, whole), "drafter": loss(drafter, bpe, whole)},
        **speed(target, drafter),
        "agreement": agreement(target, drafter, [bpe.encode(text.prompt).ids for text in texts]),
    }
    print(json.dumps(result))


def load(folder: Path) -> PreTrainedModel:
    """Loads the model of a folder in float32."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model


@torch.inference_mode()
def loss(model: PreTrainedModel, bpe: Tokenizer, texts: Sequence[str]) -> dict[str, float]:
    """Loss in nats per token and bits per byte over `texts`, each scored alone, without its first token."""
    nats = tokens = size = 0.0
    for text in texts:
        ids = bpe.encode(text).ids
        logits = model(input_ids=torch.tensor([ids[:-1]])).logits[0]
        nats += float(functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="sum"))
        tokens += len(ids) - 1
        size += len(text.encode()) - len(bpe.decode(ids[:1], skip_special_tokens=False).encode())
    return {"nats_per_token": round(nats / tokens, 4), "bits_per_byte": round(nats / math.log(2) / size, 4)}


def speed(target: PreTrainedModel, drafter: PreTrainedModel) -> dict[str, object]:
    """Milliseconds per token of both models, and the ratio of target to drafter.

    The models are timed in turn, and the fastest round of each counts: other work only adds time.
    """
    rounds = [(milliseconds(target), milliseconds(drafter)) for _ in range(ROUNDS)]
    slow, fast = (min(times) for times in zip(*rounds, strict=True))
    return {
        "ms_per_token": {"target": round(slow, 3), "drafter": round(fast, 3)},
        "ratio": round(slow / fast, 2),
    }


@torch.inference_mode()
def milliseconds(model: PreTrainedModel) -> float:
    """Median milliseconds of a forward pass of one new token, batch 1, after `CONTEXT` or more tokens.

    The milliseconds are the thread's processor time, which does not include waits on a busy machine.
    """
    cache = DynamicCache(config=model.config)
    ids = torch.arange(CONTEXT)[None] % model.config.vocab_size
    model(input_ids=ids, past_key_values=cache)
    times = []
    for _ in range(STEPS):
        started = time.thread_time()
        model(input_ids=ids[:, :1], past_key_values=cache)
        times.append(time.thread_time() - started)
    return statistics.median(times) * 1e3


def agreement(
    target: PreTrainedModel, drafter: PreTrainedModel, starts: Sequence[Sequence[int]], new: int = NEW_TOKENS
) -> dict[str, float]:
    """Share of the target's greedy tokens after `starts` that are among the drafter's k likeliest tokens."""
    ranks = torch.cat([_ranks(target, drafter, ids, new) for ids in starts])
    shares = {f"top_{width}": round(float((ranks < width).float().mean()), 4) for width in WIDTHS}
    return {**shares, "positions": len(ranks)}


@torch.inference_mode()
def _ranks(
    target: PreTrainedModel, drafter: PreTrainedModel, prompt: Sequence[int], new: int
) -> torch.Tensor:
    text = greedy(target, prompt, new)
    continued = torch.tensor(text[len(prompt) :])
    logits: torch.Tensor = drafter(input_ids=torch.tensor([text[:-1]])).logits[0, len(prompt) - 1 :]
    return (logits > logits.gather(1, continued[:, None])).sum(-1)


@torch.inference_mode()
def greedy(target: PreTrainedModel, prompt: Sequence[int], new: int) -> list[int]:
    """`prompt` and the target's greedy continuation of at most `new` tokens, up to and including eos."""
    cache = DynamicCache(config=target.config)
    text, ids = list(prompt), torch.tensor([list(prompt)])
    for _ in range(new):
        chosen = int(target(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits[0, -1].argmax())
        text.append(chosen)
        if chosen == target.config.eos_token_id:
            break
        ids = torch.tensor([[chosen]])
    return text


if __name__ == "__main__":
    main()
