"""Several answers to one request: sessions of their own, one epoch, one stream, one end."""

from typing import Any

import pytest

from outrider.client import Chunk
from outrider.v1 import generation_pb2
from outrider.wire.epochs import wall_clock_ms
from speculative.errors import InvalidRequest, Overloaded, StaleEpoch, Superseded, Unavailable
from speculative.noise import derive
from speculative.stop import FinishReason
from tests.orchestrator.relay.test_recovery import asked


def expected(prompt_length: int, count: int) -> tuple[int, ...]:
    return tuple(2 + (position * 7) % 94 for position in range(prompt_length, prompt_length + count))


async def test_choices_are_sessions_of_one_epoch_with_derived_seeds(world: Any) -> None:
    verifier = await world.verifier()
    front = await world.ready(await world.front([verifier.address]))
    completion = await front.client.generate(ids=[5, 6], max_tokens=9, n=3, seed=42, session="mine")
    opened = sorted(verifier.opened, key=lambda message: message.key.choice)
    assert [(m.key.session, m.key.choice) for m in opened] == [("mine", 0), ("mine", 1), ("mine", 2)]
    assert [m.seed for m in opened] == [derive(42, choice) for choice in range(3)]
    assert len({m.epoch for m in opened}) == 1
    assert [choice.ids for choice in completion.choices] == [expected(2, 9)] * 3
    assert [choice.seed for choice in completion.choices] == [m.seed for m in opened]
    assert (completion.ids, completion.seed) == (expected(2, 9), 42)
    assert completion.usage.completion_tokens == 27
    assert front.sample("prompt_tokens_total") == 2
    assert front.sample("generation_tokens_total") == 27
    assert front.sample("request_success_total", finished_reason="length") == 1


async def test_chunks_say_whose_they_are_and_come_in_order(world: Any, table: Any) -> None:
    verifier = await world.verifier(tokens=table)
    front = await world.ready(await world.front([verifier.address]))
    chunks: dict[int, list[Chunk]] = {0: [], 1: []}
    stream = front.client.stream("ab", max_tokens=12, n=2)
    async for chunk in stream:
        chunks[chunk.choice].append(chunk)
    completion = await stream.completion()
    for choice, parts in chunks.items():
        assert tuple(id_ for part in parts for id_ in part.ids) == expected(2, 12)
        assert "".join(part.text for part in parts) == completion.choices[choice].text


async def test_one_choice_is_as_simple_as_before(world: Any) -> None:
    verifier = await world.verifier()
    front = await world.ready(await world.front([verifier.address]))
    completion = await front.client.generate(ids=[5], max_tokens=3)
    (only,) = completion.choices
    assert (only.ids, only.seed, only.usage) == (completion.ids, completion.seed, completion.usage)


async def test_more_choices_than_one_verifier_decodes_are_no_reason_to_come_back(world: Any) -> None:
    verifiers = [await world.verifier(), await world.verifier()]
    front = await world.ready(await world.front([verifier.address for verifier in verifiers]))
    says = r"n is 9; no verifier of model '.*' decodes more than 8 at once"
    with pytest.raises(InvalidRequest, match=says):
        await front.client.generate(ids=[5], max_tokens=3, n=9)
    assert not any(verifier.opened for verifier in verifiers)
    completion = await front.client.generate(ids=[5], max_tokens=3, n=8)
    assert len(completion.choices) == 8


async def test_an_answer_of_more_choices_than_one_verifier_decodes_can_be_resumed(world: Any) -> None:
    verifier = await world.verifier()
    front = await world.ready(await world.front([verifier.address]))
    have = [generation_pb2.TokenIds(ids=expected(1, 1))] * 9
    responses = await asked(front, session="mine", seed=42, n=9, max_tokens=3, have=have, seen_epoch=1)
    assert sum(response.HasField("finished") for response in responses) == 9
    assert all(message.recovered for message in verifier.opened)


async def test_cancel_ends_all_choices(world: Any) -> None:
    verifier = await world.verifier(per_tick=1, tick_s=0.02)
    front = await world.ready(await world.front([verifier.address]))
    stream = front.client.stream(ids=[5], session="mine", max_tokens=60, n=3)
    await anext(stream)
    verifier.per_tick = 0  # no choice ends by itself first
    assert await front.client.cancel("mine")
    completion = await stream.completion()
    assert [choice.finish_reason for choice in completion.choices] == ["cancelled"] * 3
    assert {key.choice for key, _ in verifier.cancelled} == {0, 1, 2}


async def test_a_client_that_goes_away_before_the_last_choice_ends_has_cancelled_its_request(
    world: Any,
) -> None:
    verifier = await world.verifier(per_tick=0)
    front = await world.ready(await world.front([verifier.address]))
    async with front.client.stream(ids=[5], session="mine", max_tokens=60, n=2) as stream:
        await world.until(lambda: len(verifier.sessions) == 2)
        first = next(it for key, it in verifier.sessions.items() if key.choice == 0)
        first.length, first.finished = first.message.limit, FinishReason.LENGTH
        await anext(stream)
        # The end of the first choice was passed on.
        await world.until(lambda: front.sample("acceptance_length_count", model_name="toy") == 1)
    await world.until(lambda: front.sample("requests") == 0)
    assert front.sample("request_success_total", finished_reason="cancelled") == 1
    assert not front.sample("request_success_total", finished_reason="length")


async def test_a_client_that_goes_away_and_a_deadline_end_all_choices(world: Any) -> None:
    verifier = await world.verifier(per_tick=1, tick_s=0.02)
    front = await world.ready(await world.front([verifier.address]))
    async with front.client.stream(ids=[5], max_tokens=60, n=3) as stream:
        await anext(stream)
    await world.until(lambda: {key.choice for key, _ in verifier.cancelled} == {0, 1, 2})
    before = len(verifier.opened)
    while len(verifier.opened) < before + 2:  # on a busy machine the time may be over before they are opened
        verifier.cancelled.clear()
        with pytest.raises(Unavailable):
            await front.client.generate(ids=[5], n=2, timeout=0.2, max_tokens=60)
    await world.until(lambda: {key.choice for key, _ in verifier.cancelled} == {0, 1})
    await world.until(lambda: front.sample("peer_sessions", peer=verifier.address) == 0)


async def test_a_later_request_takes_over_all_choices(world: Any) -> None:
    verifier = await world.verifier(per_tick=1, tick_s=0.02)
    front = await world.ready(await world.front([verifier.address]))
    earlier = front.client.stream(ids=[5], session="mine", max_tokens=60, n=3)
    await anext(earlier)
    later = await front.client.generate(ids=[6, 7], session="mine", max_tokens=4)
    with pytest.raises(Superseded, match="mine"):
        await earlier.completion()
    assert later.ids == expected(2, 4)
    await world.until(lambda: {key.choice for key, _ in verifier.cancelled} >= {1, 2})


async def test_where_not_all_choices_find_room_none_is_left_running(world: Any) -> None:
    verifier = await world.verifier(per_tick=1, tick_s=0.02, refusals={1: Overloaded("no room for two", 3.0)})
    front = await world.ready(await world.front([verifier.address]))
    with pytest.raises(Overloaded, match="no room for two"):
        await front.client.generate(ids=[5], n=3, max_tokens=60)
    await world.until(lambda: {key.choice for key, _ in verifier.cancelled} == {0, 2})


async def test_one_stale_choice_moves_all_to_a_higher_epoch(world: Any) -> None:
    theirs = wall_clock_ms() + 60_000 << 20
    verifier = await world.verifier(refusals={1: StaleEpoch("older", theirs)})
    front = await world.ready(await world.front([verifier.address]))
    completion = await front.client.generate(ids=[5], n=3, max_tokens=8)
    assert [choice.ids for choice in completion.choices] == [expected(1, 8)] * 3
    assert all(message.epoch > theirs for message in verifier.opened[-3:])
    assert len({message.epoch for message in verifier.opened[-3:]}) == 1


async def test_an_epoch_of_the_far_future_costs_its_session_alone(world: Any) -> None:
    verifier = await world.verifier(refusals={0: StaleEpoch("older", 2**64 - 1)})
    front = await world.ready(await world.front([verifier.address]))
    with pytest.raises(Superseded, match=r"'victim' cannot be taken over: epoch .* days ahead"):
        await front.client.generate(ids=[5], session="victim", max_tokens=2)
    completion = await front.client.generate(ids=[5], session="other", max_tokens=8)
    assert completion.ids == expected(1, 8)
    assert verifier.opened[-1].epoch >> 20 <= wall_clock_ms()


async def test_what_is_asked_beside_ids_reaches_the_verifier(world: Any) -> None:
    verifier = await world.verifier()
    front = await world.ready(await world.front([verifier.address]))
    asked: dict[str, Any] = {"min_tokens": 3, "stop_ids": [9, 8], "ignore_eos": True}
    await front.client.generate(
        ids=[5], max_tokens=4, **asked, logprobs=True, top_logprobs=5, logprobs_of="processed"
    )
    await front.client.generate(ids=[5], max_tokens=4)
    first, second = verifier.opened
    sampling = first.sampling
    assert (sampling.min_tokens, list(sampling.stop_ids), sampling.ignore_eos) == (3, [8, 9], True)
    assert (first.logprobs.top_logprobs, first.logprobs.logprobs_of) == (5, 2)
    assert not second.HasField("logprobs")
    assert not second.sampling.ListFields()


async def test_a_stop_id_has_no_text_of_its_own(world: Any, table: Any) -> None:
    verifier = await world.verifier(tokens=table)
    front = await world.ready(await world.front([verifier.address]))
    last = expected(2, 6)[-1]
    completion = await front.client.generate("ab", max_tokens=6, stop_ids=[last])
    assert completion.ids == expected(2, 6)
    assert completion.text.encode() == b"".join(map(table.token_bytes, completion.ids[:-1]))


async def test_an_end_id_that_is_an_ordinary_token_has_no_text(world: Any, table: Any) -> None:
    end = expected(2, 6)[-1]
    verifier = await world.verifier(tokens=table, eos_ids=(1, end))
    front = await world.ready(await world.front([verifier.address]))
    completion = await front.client.generate("ab", max_tokens=6)
    assert completion.ids == expected(2, 6)
    assert completion.text.encode() == b"".join(map(table.token_bytes, completion.ids[:-1]))
    ignoring = await front.client.generate("ab", max_tokens=6, ignore_eos=True)
    assert ignoring.text.encode() == b"".join(map(table.token_bytes, completion.ids))
    stopping = await front.client.generate("ab", max_tokens=6, ignore_eos=True, stop_ids=[end])
    assert stopping.text == completion.text


async def test_an_end_id_completes_no_stop_string(world: Any, table: Any) -> None:
    *_, before, end = expected(2, 6)
    verifier = await world.verifier(tokens=table, eos_ids=(end,))
    front = await world.ready(await world.front([verifier.address]))
    stop = (table.token_bytes(before) + table.token_bytes(end)).decode()
    completion = await front.client.generate("ab", max_tokens=6, stop=[stop])
    assert completion.text.encode() == b"".join(map(table.token_bytes, completion.ids[:-1]))
