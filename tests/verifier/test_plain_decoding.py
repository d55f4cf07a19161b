"""Through a real socket, with a target whose logits are known: the ids are those of the rule itself."""

import pytest
from harness import GREEDY, serving
from ngram_lm import NgramLM

from speculative.history import History
from speculative.noise import gumbel
from speculative.params import SamplingParams
from speculative.sampling import sample_token


def by_the_rule(target: NgramLM, ids: list[int], new: int, params: SamplingParams, seed: int) -> list[int]:
    """The definition: one token at a time, at its own position."""
    ids, prompt = list(ids), len(ids)
    for position in range(prompt, prompt + new):
        noise = gumbel(seed, position, target.vocabulary_size)
        ids.append(sample_token(target.logits(ids), params, History.of(ids, prompt), noise))
    return ids[prompt:]


PARAMS = [
    GREEDY,
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=0.8, top_k=5, top_p=0.9, min_p=0.02),
    SamplingParams(temperature=1.2, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2),
    SamplingParams(temperature=0.0, logit_bias=((3, 4.0), (9, -50.0)), frequency_penalty=0.7),
]


@pytest.mark.parametrize("params", PARAMS)
async def test_plain_ids_are_those_of_the_rule(params: SamplingParams) -> None:
    target = NgramLM()
    async with serving(target) as verifier:
        answer = await verifier.generate([1, 2, 3, 4], params=params, seed=11)
    assert answer.ids == by_the_rule(target, [1, 2, 3, 4], 24, params, 11)
    assert answer.usage.rounds == answer.usage.completion_tokens == 24
