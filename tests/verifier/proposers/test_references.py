"""The source inside the verifier that copies from the texts that come with a request."""

import random

import grpc
import pytest
from harness import GREEDY, serving
from ngram_lm import NgramLM

from speculative.params import SamplingParams
from verifier_service.proposers import PROPOSERS

PROMPT = [1, 2, 3]
WANTED = [("references", "")]
SAMPLED = SamplingParams(temperature=0.8)
BOTH = pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])


def texts(*ids: list[int]) -> list[dict[str, list[int]]]:
    return [{"ids": each} for each in ids]


@BOTH
async def test_one_of_several_references_that_is_the_answer_saves_most_passes(params: SamplingParams) -> None:
    async with serving(NgramLM(), budget="fixed") as verifier:
        plain = await verifier.generate(PROMPT, new=120, params=params)
        copied = await verifier.generate(
            PROMPT,
            new=120,
            params=params,
            sources=WANTED,
            node_limit=64,
            references=texts([7] * 20, plain.ids, [9, 8, 7]),
        )
    assert copied.ids == plain.ids
    assert copied.usage.accepted_by_source["references"] > 110
    assert copied.usage.rounds < 10


@BOTH
async def test_an_edited_text_is_followed_from_edit_to_edit(params: SamplingParams) -> None:
    async with serving(NgramLM(), budget="fixed") as verifier:
        plain = await verifier.generate(PROMPT, new=120, params=params)
        ids = plain.ids
        edited = [*ids[:20], 31, 30, 31, *ids[22:50], *ids[56:80], 5, 6, *ids[80:]]
        copied = await verifier.generate(
            PROMPT, new=120, params=params, sources=WANTED, node_limit=64, references=texts(edited)
        )
    assert copied.ids == plain.ids
    assert copied.usage.accepted_by_source["references"] > 90


@BOTH
async def test_all_sources_inside_together_change_no_id(params: SamplingParams) -> None:
    chance = random.Random(2)
    async with serving(NgramLM(), budget="fixed") as verifier:
        plain = await verifier.generate(PROMPT, new=60, params=params)
        near = [chance.randrange(32) if chance.random() < 0.2 else id_ for id_ in plain.ids]
        mixed = await verifier.generate(
            PROMPT,
            new=60,
            params=params,
            sources=[(name, "") for name in sorted(PROPOSERS)],
            prediction=near,
            references=texts(near[20:], list(range(32)) * 2, [7] * 40, plain.ids[30:]),
        )
    assert mixed.ids == plain.ids
    assert mixed.usage.accepted_by_source["references"] > 0


@BOTH
async def test_a_session_that_was_moved_is_followed_where_it_stands(params: SamplingParams) -> None:
    async with serving(NgramLM(), budget="fixed") as verifier:
        plain = await verifier.generate(PROMPT, new=90, params=params)
        moved = await verifier.generate(
            [*PROMPT, *plain.ids[:30]],
            new=60,
            params=params,
            sources=WANTED,
            references=texts([5] * 8, plain.ids),
            prompt_length=len(PROMPT),
        )
    assert moved.ids == plain.ids[30:]
    assert moved.usage.accepted_by_source["references"] > 40


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (
            {"references": texts([5] * 200, [6] * 56)},
            "references has 256 ids; together they must have fewer than 256",
        ),
        ({"references": texts([5] * 1_000_000)}, "the message is too large"),
        (
            {"references": texts([5] * 100), "prediction": [5] * 156},
            "prediction has 156 ids and references has 100 ids; together they must have fewer than 256",
        ),
        ({"references": texts([5], [5, 32])}, r"references\[1\] has id 32; ids of"),
        ({"references": texts(*[[5]] * 17)}, "references has 17 texts; at most 16"),
    ],
)
async def test_what_cannot_be_references_is_refused(fields: dict[str, list[int]], says: str) -> None:
    async with serving(NgramLM()) as verifier:
        with pytest.raises(grpc.RpcError, match=says):
            await verifier.open(verifier.request(PROMPT, sources=WANTED, **fields))
        after = await verifier.generate(PROMPT, new=8)
    assert len(after.ids) == 8, "the worker serves on"
