"""Decodes with transformers in a process of its own, the peer that Outrider is compared with.

Reads one JSON request per line of stdin and writes one JSON answer per line of stdout. A benchmark starts it
as `python -m benchmarks.shared.hf_peer TARGET [DRAFTER]`. Knows nothing of Outrider's services.
"""

import argparse
import json
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging


def load(path: str, ignore_eos: bool) -> Any:
    """Loads a causal LM in float32 on the CPU, ready to decode."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    if ignore_eos:
        model.generation_config.eos_token_id = None
    return model


def padded(batch: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids of the prompts padded on the left, and 1 where a token stands; both int64 [prompts, longest]."""
    longest = max(map(len, batch))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in batch])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in batch])
    return ids, mask


def decode(target: Any, drafter: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Times one `generate` call of a batch.

    The request's `method` is generate, assisted, prompt_lookup or early_exit. Sampling options beside the
    temperature are optional.
    """
    torch.set_num_threads(request["threads"])
    torch.manual_seed(request["seed"])
    ids, mask = padded(request["batch"])
    options: dict[str, Any] = {
        "max_new_tokens": request["max_tokens"],
        "do_sample": request["temperature"] > 0,
        "repetition_penalty": request.get("repetition_penalty"),
    }
    if request["temperature"] > 0:
        options |= {"temperature": request["temperature"], "top_k": 0, "top_p": request.get("top_p", 1.0)}
    if request["method"] == "assisted":
        options["assistant_model"] = drafter
    elif request["method"] == "prompt_lookup":
        options["prompt_lookup_num_tokens"] = 10
    elif request["method"] == "early_exit":
        options["assistant_early_exit"] = target.config.num_hidden_layers // 2
    started = time.perf_counter()
    output = target.generate(ids, attention_mask=mask, **options)
    seconds = time.perf_counter() - started
    return {"ids": output[:, ids.shape[1] :].tolist(), "seconds": seconds}


def main() -> None:
    """Loads the models and answers requests until stdin ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("drafter", nargs="?")
    parser.add_argument("--ignore-eos", action="store_true", help="end-of-sequence ids end no text")
    given = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    target = load(given.target, given.ignore_eos)
    drafter = load(given.drafter, given.ignore_eos) if given.drafter else None
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(decode(target, drafter, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
