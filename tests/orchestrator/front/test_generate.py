"""One request through a real orchestrator, in front of a verifier that keeps the contract."""

from typing import Any

import grpc
import pytest

from outrider.client import Completion
from outrider.v1 import generation_pb2
from outrider.v1.generation_pb2_grpc import GenerationStub
from outrider.wire.epochs import wall_clock_ms
from outrider.wire.workers import CONTRACT
from speculative.errors import InvalidRequest, Overloaded, Superseded, Unavailable, UnknownModel

VOCABULARY, MAX_LENGTH = 96, 64


def expected(prompt_length: int, count: int) -> tuple[int, ...]:
    return tuple(
        2 + (position * 7) % (VOCABULARY - 2) for position in range(prompt_length, prompt_length + count)
    )


async def test_the_committed_ids_reach_the_client_in_order_and_once(world: Any) -> None:
    verifier = await world.verifier()
    front = await world.ready(await world.front([verifier.address]))
    completion: Completion = await front.client.generate(ids=[5, 6, 7], max_tokens=20)
    assert completion.ids == expected(3, 20)
    assert completion.finish_reason == "length"
    assert completion.usage.completion_tokens == 20
    assert completion.sources == ("target",) * 20


async def test_the_verifier_gets_the_options_that_the_client_asked_for(world: Any) -> None:
    verifier = await world.verifier()
    front = await world.ready(await world.front([verifier.address]))
    await front.client.generate(
        ids=[5, 6],
        max_tokens=3,
        temperature=0.5,
        top_k=4,
        seed=2**64 - 1,
        nodes=7,
        session="mine",
        tenant="us",
    )
    (message,) = verifier.opened
    assert list(message.ids) == [5, 6]
    assert (message.prompt_length, message.limit, message.seed) == (2, 5, 2**64 - 1)
    assert (message.sampling.temperature, message.sampling.top_k) == (0.5, 4)
    assert (message.key.tenant, message.key.session) == ("us", "mine")
    assert message.speculate
    assert message.node_limit == 7
    assert [(source.name, source.address) for source in message.sources] == [("lookup", "")]


async def test_an_answer_that_is_wanted_whole_asks_the_verifier_for_few_messages(world: Any) -> None:
    verifier = await world.verifier()
    front = await world.ready(await world.front([verifier.address]))
    whole = await front.client.generate(ids=[5, 6, 7], max_tokens=20)
    streamed = await front.client.stream(ids=[5, 6, 7], max_tokens=20).completion()
    await front.client.stream(ids=[5, 6, 7], max_tokens=20, message_interval_ms=30).completion()
    assert whole.ids == streamed.ids == expected(3, 20)
    assert verifier.intervals_ms == [200, 0, 30]


async def test_what_the_client_leaves_out_is_chosen_and_said(world: Any) -> None:
    verifier = await world.verifier()
    front = await world.ready(await world.front([verifier.address]))
    first = await front.client.generate(ids=[5])
    second = await front.client.generate(ids=[5])
    assert len(first.ids) == MAX_LENGTH - 1, "128 by default, or what the context leaves"
    assert first.seed != second.seed
    assert first.session != second.session
    assert verifier.opened[0].epoch < verifier.opened[1].epoch


async def test_without_speculation_no_source_is_named(world: Any) -> None:
    verifier = await world.verifier()
    front = await world.ready(await world.front([verifier.address]))
    await front.client.generate(ids=[5], max_tokens=2, speculation=False)
    await front.client.generate(ids=[5], max_tokens=2, nodes=0)
    assert [(m.speculate, list(m.sources)) for m in verifier.opened] == [(False, []), (False, [])]


async def test_text_is_tokenized_and_generated_ids_are_text_again(world: Any, table: Any) -> None:
    verifier = await world.verifier(tokens=table)
    front = await world.ready(await world.front([verifier.address]))
    chunks = [chunk async for chunk in front.client.stream("def", max_tokens=12)]
    ids = [id_ for chunk in chunks for id_ in chunk.ids]
    assert list(verifier.opened[0].ids) == table.encode("def")
    assert ids == list(expected(3, 12))
    assert "".join(chunk.text for chunk in chunks).encode() == b"".join(table.token_bytes(id_) for id_ in ids)


async def test_a_model_without_a_tokenizer_takes_ids_and_gives_no_text(world: Any) -> None:
    verifier = await world.verifier()
    front = await world.ready(await world.front([verifier.address]))
    with pytest.raises(InvalidRequest, match="no tokenizer: give ids"):
        await front.client.generate("text")
    with pytest.raises(InvalidRequest, match="no tokenizer: stop strings"):
        await front.client.generate(ids=[3], stop=["a"])
    assert (await front.client.generate(ids=[3], max_tokens=2)).text == ""


async def test_cancel_ends_the_request_with_what_was_committed(world: Any) -> None:
    verifier = await world.verifier(per_tick=1, tick_s=0.02)
    front = await world.ready(await world.front([verifier.address]))
    stream = front.client.stream(ids=[5], session="mine", max_tokens=60)
    await anext(stream)
    verifier.per_tick = 0  # the request cannot end by itself first
    assert await front.client.cancel("mine")
    completion = await stream.completion()
    assert completion.finish_reason == "cancelled"
    assert completion.ids == expected(1, len(completion.ids))
    assert not await front.client.cancel("mine"), "it has ended"
    assert not await front.client.cancel("nobody")


async def test_a_client_that_goes_away_cancels_its_session(world: Any) -> None:
    verifier = await world.verifier(per_tick=1, tick_s=0.02)
    front = await world.ready(await world.front([verifier.address]))
    async with front.client.stream(ids=[5], session="mine", max_tokens=60) as stream:
        await anext(stream)
        verifier.per_tick = 0
    await world.until(lambda: verifier.cancelled)
    assert verifier.cancelled[0][0].session == "mine"
    await world.until(lambda: front.sample("request_success_total", finished_reason="cancelled") == 1)
    assert front.sample("requests") == 0


async def test_a_passed_deadline_ends_the_request_and_the_session(world: Any) -> None:
    verifier = await world.verifier(per_tick=0)
    front = await world.ready(await world.front([verifier.address]))
    while not verifier.opened:  # on a busy machine the time may be over before the verifier hears of it
        with pytest.raises(Unavailable):
            await front.client.generate(ids=[5], timeout=0.3)
    await world.until(lambda: verifier.cancelled)
    assert 0 < verifier.opened[0].time_left_ms <= 300 + 250


async def test_a_later_request_takes_over_the_session(world: Any) -> None:
    verifier = await world.verifier(per_tick=1, tick_s=0.02)
    front = await world.ready(await world.front([verifier.address]))
    earlier = front.client.stream(ids=[5], session="mine", max_tokens=60)
    await anext(earlier)
    later = await front.client.generate(ids=[6, 7], session="mine", max_tokens=4)
    with pytest.raises(Superseded, match="mine"):
        await earlier.completion()
    assert later.ids == expected(2, 4)
    assert verifier.opened[0].epoch < verifier.opened[1].epoch


async def test_an_epoch_that_is_behind_is_chosen_again_above_the_highest(world: Any) -> None:
    theirs = wall_clock_ms() + 60_000 << 20
    verifier = await world.verifier(highest=theirs)
    front = await world.ready(await world.front([verifier.address]))
    assert (await front.client.generate(ids=[5], max_tokens=3)).ids == expected(1, 3)
    assert verifier.opened[0].epoch > theirs


async def test_a_full_verifier_passes_on_when_to_try_again(world: Any) -> None:
    verifier = await world.verifier(refusal=Overloaded("full", 3.0))
    front = await world.ready(await world.front([verifier.address]))
    with pytest.raises(Overloaded) as caught:
        await front.client.generate(ids=[5])
    assert caught.value.retry_after_s == 3.0


async def test_one_verifier_too_full_sends_the_request_to_another(world: Any) -> None:
    full = await world.verifier(refusal=Overloaded("full", 3.0))
    free = await world.verifier()
    front = await world.front([full.address, free.address])
    await world.until(lambda: sum(front.sample("peer_up", peer=fake.address) for fake in (full, free)) == 2)
    assert (await front.client.generate(ids=[5], max_tokens=3)).ids == expected(1, 3)
    assert len(free.opened) == 1


async def test_more_requests_than_there_is_room_for_are_refused(world: Any) -> None:
    verifier = await world.verifier(per_tick=0)
    front = await world.ready(await world.front([verifier.address], max_streams=1))
    held = front.client.stream(ids=[5], session="mine")
    await world.until(lambda: verifier.opened)
    with pytest.raises(Overloaded):
        await front.client.generate(ids=[5])
    held.close()


async def test_several_models_are_told_apart_by_name(world: Any) -> None:
    one, two = await world.verifier(model="one"), await world.verifier(model="two")
    front = await world.ready(await world.front([one.address, two.address]), models=2)
    await front.client.generate(ids=[5], model="two", max_tokens=2)
    assert (len(one.opened), len(two.opened)) == (0, 1)
    with pytest.raises(InvalidRequest, match="one, two"):
        await front.client.generate(ids=[5])
    with pytest.raises(UnknownModel, match="one, two"):
        await front.client.generate(ids=[5], model="three")


async def test_sessions_of_one_model_are_spread_over_its_verifiers(world: Any) -> None:
    one, two = await world.verifier(per_tick=0), await world.verifier(per_tick=0)
    front = await world.front([one.address, two.address])
    await world.until(lambda: sum(front.sample("peer_up", peer=fake.address) for fake in (one, two)) == 2)
    held = [front.client.stream(ids=[5], session=f"s{n}") for n in range(4)]
    await world.until(lambda: len(one.opened) + len(two.opened) == 4)
    assert len(one.opened) == 2
    for stream in held:
        stream.close()


async def test_a_source_is_named_where_its_tokenizer_is_the_targets(world: Any, table: Any) -> None:
    verifier = await world.verifier(tokens=table)
    fitting = await world.source(digest=table.digest)
    other = await world.source(name="stranger", digest="another")
    front = await world.ready(await world.front([verifier.address], (fitting, other)), sources=2)
    await front.client.generate(ids=[5], max_tokens=2)
    await front.client.generate(ids=[5], max_tokens=2, sources=["drafter"])
    named = [[(source.name, source.address) for source in m.sources] for m in verifier.opened]
    assert named == [[("lookup", ""), ("drafter", fitting)], [("drafter", fitting)]]
    with pytest.raises(InvalidRequest, match="stranger"):
        await front.client.generate(ids=[5], sources=["stranger"])


async def test_a_source_that_speaks_another_contract_drafts_for_nobody_and_the_reason_is_counted(
    world: Any,
) -> None:
    verifier = await world.verifier()
    odd, good = await world.source(name="odd", contract=CONTRACT + 1), await world.source()
    front = await world.ready(await world.front([verifier.address], (odd, good)), sources=2)
    await world.until(lambda: front.sample("peer_refused", peer=odd, reason="contract") == 1)
    await front.client.generate(ids=[5], max_tokens=2)
    assert [source.address for source in verifier.opened[-1].sources] == ["", good]
    with pytest.raises(InvalidRequest, match="odd"):
        await front.client.generate(ids=[5], max_tokens=2, sources=["odd"])


async def test_a_source_of_one_tenant_is_named_to_no_other_tenant(world: Any) -> None:
    verifier = await world.verifier()
    own, common = await world.source(tenant="ann"), await world.source(name="common")
    alone = await world.source(name="alone", tenant="ann")
    front = await world.ready(await world.front([verifier.address], (own, common, alone)), sources=2)
    await world.until(lambda: all(front.sample("peer_up", peer=peer) for peer in (own, common, alone)))
    for tenant in ("ann", "bob"):
        await front.client.generate(ids=[5], max_tokens=2, tenant=tenant)
    named = [[source.address for source in m.sources] for m in verifier.opened]
    assert named == [["", own, common, alone], ["", common]]
    with pytest.raises(InvalidRequest, match="'alone', which does not draft for this model"):
        await front.client.generate(ids=[5], max_tokens=2, tenant="bob", sources=["alone"])
    (model,) = await front.client.models()
    assert model.sources == ("lookup", "common")


@pytest.mark.parametrize("name", ["", "x" * 65, "a,b", "q\nz", "target", "lookup"])
async def test_a_source_with_a_name_that_cannot_be_its_own_is_ignored_and_told_once(
    world: Any, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    verifier = await world.verifier()
    bad, good = await world.source(name=name), await world.source()
    front = await world.ready(await world.front([verifier.address], (bad, good)), sources=2)
    await world.until(lambda: front.sample("peer_up", peer=bad))
    for _ in range(2):
        await front.client.generate(ids=[5], max_tokens=2)
    (model,) = await front.client.models()
    assert model.sources == ("lookup", "drafter")
    assert [source.address for source in verifier.opened[-1].sources] == ["", good]
    assert [record.message for record in caplog.records if "source ignored" in record.message] == [
        record.message for record in caplog.records if getattr(record, "fields", {}).get("peer") == bad
    ][:1]


async def test_a_process_of_several_names_is_a_source_under_each(world: Any) -> None:
    verifier = await world.verifier()
    retrieval = await world.source(name="retrieval", names=("corpus", "past"))
    front = await world.ready(await world.front([verifier.address], retrieval=(retrieval,)), sources=3)
    await front.client.generate(ids=[5], max_tokens=2, learn=False, corpora="code")
    await front.client.generate(ids=[5], max_tokens=2, sources=["past"])
    named = [[(source.name, source.address) for source in m.sources] for m in verifier.opened]
    both = [("lookup", ""), ("corpus", retrieval), ("past", retrieval)]
    assert named == [both, [("past", retrieval)]]
    assert [(m.learn, list(m.corpora)) for m in verifier.opened] == [(False, ["code"]), (True, [])]
    assert front.sample("peer_sessions", peer=retrieval) == 0, "each session was counted once"
    with pytest.raises(InvalidRequest, match="cannot name a corpus"):
        await front.client.generate(ids=[5], corpora=["../x"])


async def test_several_drafters_share_the_sessions(world: Any) -> None:
    verifier = await world.verifier(per_tick=0)
    drafters = (await world.source(), await world.source())
    front = await world.front([verifier.address], drafters)
    await world.until(
        lambda: sum(front.sample("peer_up", peer=peer) for peer in (verifier.address, *drafters)) == 3
    )
    held = [front.client.stream(ids=[5], session=f"s{n}", sources=["drafter"]) for n in range(4)]
    await world.until(lambda: len(verifier.opened) == 4)
    asked = sorted(message.sources[0].address for message in verifier.opened)
    assert asked == sorted(drafters * 2)
    for stream in held:
        stream.close()


async def test_the_first_message_must_be_a_request(world: Any) -> None:
    verifier = await world.verifier()
    front = await world.ready(await world.front([verifier.address]))
    async with grpc.aio.insecure_channel(front.address) as channel:
        stub: Any = GenerationStub(channel)
        for messages in ([], [generation_pb2.GenerateRequest()]):
            call = stub.Generate(iter(messages))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_prompt_ids_come_back_where_they_are_asked_for(world: Any, table: Any) -> None:
    verifier = await world.verifier(tokens=table)
    front = await world.ready(await world.front([verifier.address]))
    start = generation_pb2.GenerateStart(text="abc", return_prompt_ids=True, max_tokens=1)
    async with grpc.aio.insecure_channel(front.address) as channel:
        stub: Any = GenerationStub(channel)
        first = await stub.Generate(iter([generation_pb2.GenerateRequest(start=start)])).read()
    assert list(first.started.prompt_ids) == table.encode("abc")
    assert first.started.prompt_tokens == 3
    assert first.started.model == "toy"
