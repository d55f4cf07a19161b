"""Chains of drafts beside plain decoding, for families of targets that verify chains and no trees.

Models are tiny, with random weights, so drafts come from an oracle: each drafted id is the target's own with
a given probability. What the run shows is what verifying a chain costs, replays of states included. Every way
to decode has to give the same ids. Processor time is measured, and ways take turns, prompt by prompt, so that
the ratios hold on a busy machine.
docs/figures/chain_targets.md says what each field means.
"""

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from benchmarks.shared.envelope import command_line, print_result, settings_of
from outrider.lm.chains.chain_lm import ChainLM
from outrider.lm.plan import SequenceRows
from outrider.lm.runner import PackedLM

VOCABULARY, WIDTH, CONTEXT = 2048, 192, 512
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_MAMBA2 = {
    "mamba_n_heads": 12,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 32,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen3_next": (
        "Qwen3NextConfig",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": WIDTH,
            "shared_expert_intermediate_size": WIDTH,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
        },
    ),
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention"]}),
    "bamba": ("BambaConfig", {**_MAMBA2, "attn_layer_indices": [1, 3, 5]}),
    "falcon_h1": ("FalconH1Config", {**_MAMBA2, "mamba_d_ssm": 384}),
    "mamba2": (
        "Mamba2Config",
        {"num_heads": 12, "head_dim": 32, "state_size": 16, "n_groups": 1, "chunk_size": 32},
    ),
    "mamba": ("MambaConfig", {"state_size": 16}),
    "jamba": ("JambaConfig", {"num_experts": 1, "attn_layer_period": 2, "attn_layer_offset": 1}),
    "bloom": ("BloomConfig", {"n_head": 6}),
}
"""A family of packed passes first, to compare with."""
DEPTHS = (1, 2, 4, 8)


def random_model(family: str, layers: int) -> PreTrainedModel:
    """A model of the family with random weights, wide enough that its choices depend on the context."""
    name, own = FAMILIES[family]
    wanted = {**SHAPE, "num_hidden_layers": layers, **own}
    if "layer_types" in own:
        wanted["layer_types"] = (own["layer_types"] * layers)[:layers]
    config = getattr(transformers, name)(**wanted)
    torch.manual_seed(0)
    model: PreTrainedModel = (
        AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    )
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0.0, 0.1)
    return model.requires_grad_(False)


def by_library(model: PreTrainedModel, cache_argument: str, prompt: list[int], count: int) -> list[int]:
    """Greedy ids from transformers' own cached forward."""
    cache = DynamicCache(config=model.config)
    made: list[int] = []
    ids = prompt
    with torch.inference_mode():
        while len(made) < count:
            at = (
                torch.arange(len(prompt) + len(made) - len(ids), len(prompt) + len(made))[None]
                if made
                else None
            )
            extra: dict[str, Any] = {cache_argument: cache}
            if at is not None and cache_argument == "past_key_values":
                extra["position_ids"] = at
            output = model(input_ids=torch.tensor([ids]), use_cache=True, **extra)
            made.append(int(output.logits[0, -1].argmax()))
            ids = made[-1:]
    return made


class Decoding:
    """Greedy decoding of one prompt with drafts of a fixed depth."""

    def __init__(self, lm: PackedLM, prompt: list[int], hit: float, depth: int) -> None:
        self.lm, self.ids, self.start = lm, list(prompt), len(prompt)
        self.rounds = 0
        self._hit, self._depth = hit, depth
        self._dice = random.Random(depth)
        self._table = lm.table()
        rest = prompt[:-1]
        lm.forward([SequenceRows(self._table, rest, range(-1, len(rest) - 1), ())])
        self._table.keep(range(len(rest)))

    def run(self, truth: Sequence[int]) -> list[int]:
        """Decodes as many ids as `truth` has, which are the target's."""
        while (made := len(self.ids) - self.start) < len(truth):
            chain = [self.ids[-1], *self._drafts(truth[made : made + self._depth])]
            rows = self.lm.forward(
                [SequenceRows(self._table, chain, range(-1, len(chain) - 1), range(len(chain)))]
            ).rows()
            chosen = rows.argmax(-1).tolist()
            count = 1
            while count < len(chain) and chain[count] == chosen[count - 1]:
                count += 1
            self._table.keep(range(count))
            self.ids += chosen[:count]
            self.rounds += 1
        self.lm.release(self._table)
        return self.ids[self.start : self.start + len(truth)]

    def _drafts(self, right: Sequence[int]) -> list[int]:
        return [token if self._dice.random() < self._hit else (token + 1) % VOCABULARY for token in right]


def measured(family: str, flags: argparse.Namespace) -> dict[str, Any]:
    """One family: plain decoding, the library's own, and chains of each depth."""
    model = random_model(family, flags.layers)
    lm: PackedLM
    if family == "llama":
        lm = PackedLM(model)
    else:
        lm = ChainLM(model, kv_mb=256)
        lm.settle(lm.first_trial(), 1)
    twin = random_model(family, flags.layers)
    argument = "cache_params" if family.startswith("mamba") else "past_key_values"
    dice = random.Random(1)
    times: dict[str, list[float]] = {}
    rounds = dict.fromkeys(DEPTHS, 0)
    for _ in range(flags.prompts):
        prompt = [dice.randrange(VOCABULARY) for _ in range(flags.prompt_tokens)]
        began = time.process_time()
        truth = by_library(twin, argument, prompt, flags.tokens)
        times.setdefault("library", []).append(time.process_time() - began)
        for depth in (0, *DEPTHS):
            began = time.process_time()
            decoding = Decoding(lm, prompt, flags.hit, depth)
            if decoding.run(truth) != truth:
                raise SystemExit(f"{family}: ids with chains of {depth} differ from the library's")
            times.setdefault(str(depth), []).append(time.process_time() - began)
            if depth:
                rounds[depth] += decoding.rounds
    return _summary(lm, times, rounds, flags.tokens * flags.prompts)


def _summary(
    lm: PackedLM, times: dict[str, list[float]], rounds: dict[int, int], tokens: int
) -> dict[str, Any]:
    plain = times["0"]

    def speed(way: str) -> float:
        return round(statistics.median(p / t for p, t in zip(plain, times[way], strict=True)), 3)

    return {
        "passes": "trees" if type(lm) is PackedLM else lm.passes,
        "state_bytes": getattr(lm.pool, "state_bytes", 0),
        "kv_bytes_per_token": lm.pool.layout.slot_bytes,
        "plain_tokens_per_s": round(tokens / sum(plain), 1),
        "library_speed": speed("library"),
        "chains": [
            {
                "depth": depth,
                "tokens_per_round": round(tokens / rounds[depth], 3),
                "speed": speed(str(depth)),
            }
            for depth in DEPTHS
        ],
    }


def parse() -> argparse.Namespace:
    """Parses the flags."""
    parser = command_line("chain_targets", __doc__)
    parser.add_argument("--families", default=",".join(FAMILIES), help="families, separated by commas")
    parser.add_argument("--layers", type=int, default=6, help="layers of each model")
    parser.add_argument("--hit", type=float, default=0.8, help="probability that a drafted id is right")
    parser.add_argument("--prompts", type=int, default=3, help="number of random prompts")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="ids of each prompt")
    parser.add_argument("--tokens", type=int, default=64, help="ids decoded for each prompt")
    return parser.parse_args()


def main() -> None:
    """Measures and prints the result."""
    flags = parse()
    started = time.perf_counter()
    torch.set_num_threads(1)
    families = flags.families.split(",")
    if unknown := [family for family in families if family not in FAMILIES]:
        raise SystemExit(f"no family {unknown[0]!r}; choose from {', '.join(FAMILIES)}")
    found = {family: measured(family, flags) for family in families}
    print_result("chain_targets", settings_of(flags), started, {"families": found})


if __name__ == "__main__":
    main()
