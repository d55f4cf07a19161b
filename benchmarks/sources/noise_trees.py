"""Draft trees that know the session's noise against trees of the likeliest tokens, with equally many nodes.

Simulated: the drafter keeps a tree of the given number of nodes full, and its passes take no time, so the
size of the tree is the only bound. Deterministic, whatever else the machine does.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from drafter_service.draft_tree import Growth
from drafter_service.drafters.causal_lm import CausalLMDrafter
from outrider.lm.runner import PackedLM
from outrider.pair.simulation import Scene, Simulation, Tally, Truth, continuation
from speculative.params import SamplingParams

_GREEDY = SamplingParams(temperature=0.0)
_FLOOR = 0.001
"""Survival below which no node is drafted: low, as the number of nodes is to be the bound."""


def tree_figures(
    models: tuple[str, str],
    prompts: Sequence[Sequence[int]],
    temperatures: Sequence[float],
    nodes: Sequence[int],
    tokens: int,
) -> dict[str, dict[str, dict[str, float]]]:
    """Tokens per round of both kinds of trees, by temperature and number of nodes.

    Args:
        models: folders of target and drafter.
        prompts: token ids of each prompt.
        tokens: tokens that the target writes for each prompt.
    """
    target, drafter = (PackedLM.load(model, check=False) for model in models)
    found: dict[str, dict[str, dict[str, float]]] = {}
    for temperature in temperatures:
        params = SamplingParams(temperature=temperature)
        texts = [continuation(target, prompt, params, seed, tokens) for seed, prompt in enumerate(prompts)]
        found[f"{temperature:g}"] = {
            str(count): trees_of(CausalLMDrafter(drafter), texts, count) for count in nodes
        }
    return found


def trees_of(drafter: CausalLMDrafter, texts: Sequence[Truth], nodes: int) -> dict[str, float]:
    """Tokens per round with trees of `nodes` nodes: with the session's noise, and of the likeliest tokens.

    Without noise a token's chance is its probability at the request's temperature. So that is what the
    likeliest tokens' estimates are, but for temperatures below the spread between drafter and target.
    """
    scene = Scene(drafter_step=0.05, drafter_row=0.0, way=0.0, node_limit=nodes, in_flight=4 * nodes)
    keyed, likeliest = Tally(), Tally()
    for text in texts:
        growth = Growth(floor=_FLOOR)
        Simulation(drafter, text, growth, scene, keyed).run()
        spread = replace(growth, scale=max(text.params.temperature, growth.scale))
        Simulation(drafter, replace(text, params=_GREEDY), spread, scene, likeliest).run()
    return {"keyed_noise": _length(keyed), "top_k": _length(likeliest)}


def _length(tally: Tally) -> float:
    found: Any = tally.summary()["acceptance_length"]
    return float(found)
