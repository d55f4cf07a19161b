"""The source inside the verifier that copies from what a request says its answer may resemble."""

import grpc
import pytest
from harness import GREEDY, serving
from ngram_lm import NgramLM

from speculative.params import SamplingParams

PROMPT = [1, 2, 3]
WANTED = [("prediction", "")]


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=0.8)], ids=["greedy", "sampled"])
async def test_a_prediction_that_comes_true_saves_passes(params: SamplingParams) -> None:
    async with serving(NgramLM(), budget="fixed") as verifier:
        plain = await verifier.generate(PROMPT, new=40, params=params)
        predicted = await verifier.generate(
            PROMPT, new=40, params=params, sources=WANTED, prediction=plain.ids
        )
    assert predicted.ids == plain.ids
    assert predicted.usage.accepted_by_source["prediction"] > 25
    assert predicted.usage.rounds < plain.usage.rounds / 2


async def test_an_edited_prediction_is_found_again_behind_the_edit() -> None:
    async with serving(NgramLM(), budget="fixed") as verifier:
        plain = await verifier.generate(PROMPT, new=60)
        edited = [*plain.ids[:20], 31, 30, 31, *plain.ids[22:]]
        predicted = await verifier.generate(PROMPT, new=60, sources=WANTED, prediction=edited)
    assert predicted.ids == plain.ids
    assert predicted.usage.accepted_by_source["prediction"] > 30


@pytest.mark.parametrize("prediction", [[], [7] * 200, list(range(32)) * 4])
async def test_a_wrong_prediction_changes_no_id(prediction: list[int]) -> None:
    async with serving(NgramLM()) as verifier:
        plain = await verifier.generate(PROMPT, new=40)
        predicted = await verifier.generate(
            PROMPT, new=40, sources=[*WANTED, ("lookup", "")], prediction=prediction
        )
    assert predicted.ids == plain.ids


async def test_a_session_that_was_moved_is_followed_where_it_stands() -> None:
    async with serving(NgramLM(), budget="fixed") as verifier:
        plain = await verifier.generate(PROMPT, new=60)
        moved = await verifier.generate(
            [*PROMPT, *plain.ids[:30]],
            new=30,
            sources=WANTED,
            prediction=plain.ids,
            prompt_length=len(PROMPT),
        )
    assert moved.ids == plain.ids[30:]
    assert moved.usage.accepted_by_source["prediction"] > 15


@pytest.mark.parametrize("prediction", [[5] * 256, [32]], ids=["too long", "no id"])
async def test_what_cannot_be_a_prediction_is_refused(prediction: list[int]) -> None:
    async with serving(NgramLM()) as verifier:
        with pytest.raises(grpc.RpcError, match="prediction has"):
            await verifier.open(verifier.request(PROMPT, sources=WANTED, prediction=prediction))
