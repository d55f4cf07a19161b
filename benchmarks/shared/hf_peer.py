"""Decodes with transformers in a process of its own, the peer that Outrider is compared with.

Reads one JSON request per line of stdin and writes one JSON answer per line of stdout. A benchmark starts it
as `python -m benchmarks.shared.hf_peer TARGET [DRAFTER]`. Knows nothing of Outrider's services.
"""

import json
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging


def load(path: str) -> Any:
    """Loads a causal LM in float32 on the CPU, ready to decode."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def decode(target: Any, drafter: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Times one `generate` call of a batch; the request's `method` is generate, assisted or prompt_lookup.

    The prompts of the batch have the same length. Sampling options beside the temperature are optional.
    """
    torch.set_num_threads(request["threads"])
    torch.manual_seed(request["seed"])
    ids = torch.tensor(request["batch"])
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
    started = time.perf_counter()
    output = target.generate(ids, attention_mask=torch.ones_like(ids), **options)
    seconds = time.perf_counter() - started
    return {"ids": output[:, ids.shape[1] :].tolist(), "seconds": seconds}


def main() -> None:
    """Loads the models and answers requests until stdin ends."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    target = load(sys.argv[1])
    drafter = load(sys.argv[2]) if len(sys.argv) > 2 else None
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(decode(target, drafter, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
