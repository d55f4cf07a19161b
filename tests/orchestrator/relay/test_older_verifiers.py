"""A request that an older verifier would answer wrongly goes to a newer one, or is refused by name."""

from typing import Any

import pytest

from speculative.errors import InvalidRequest, Overloaded, Unavailable

CONTRAST: dict[str, Any] = {"ids": [5], "max_tokens": 3, "contrast_strength": 0.5}
OLD: dict[str, Any] = {"request_fields": ()}


async def fleet(world: Any, *verifiers: Any) -> Any:
    front = await world.front([verifier.address for verifier in verifiers], recover_s=0.1)
    for verifier in verifiers:
        await world.until(lambda verifier=verifier: front.sample("peer_up", peer=verifier.address))
    return await world.ready(front)


async def test_a_field_that_no_verifier_knows_is_refused_by_name(world: Any) -> None:
    old = await world.verifier(**OLD)
    front = await fleet(world, old)
    with pytest.raises(InvalidRequest, match=r"sampling\.contrast_strength.*too old"):
        await front.client.generate(**CONTRAST)
    assert not old.opened
    assert len((await front.client.generate(ids=[5], max_tokens=3)).ids) == 3


async def test_requests_go_to_the_verifiers_that_know_their_fields(world: Any) -> None:
    old, new = await world.verifier(**OLD), await world.verifier()
    front = await fleet(world, old, new)
    for _ in range(6):
        assert len((await front.client.generate(**CONTRAST)).ids) == 3
    assert (len(old.opened), len(new.opened)) == (0, 6)


async def test_where_the_newer_verifiers_are_full_the_request_may_be_tried_again(world: Any) -> None:
    old, new = await world.verifier(**OLD), await world.verifier()
    front = await fleet(world, old, new)
    new.refusal = Overloaded("8 sessions are open", 1.0)
    with pytest.raises(Overloaded):
        await front.client.generate(**CONTRAST)


async def test_a_stream_whose_verifier_died_waits_for_another_that_knows_its_fields(world: Any) -> None:
    new = await world.verifier(per_tick=1, tick_s=0.02)
    front = await fleet(world, new)
    stream = front.client.stream(**{**CONTRAST, "max_tokens": 60})
    await anext(stream)
    port = new.address
    await new.server.stop(0)
    old = await world.verifier(**OLD)
    old.address = port
    await old.server.stop(0)
    await world.serve(old)
    with pytest.raises(Unavailable, match=r"sampling\.contrast_strength"):
        await stream.completion()
    assert not old.opened


async def test_fields_that_only_say_how_to_draft_go_to_any_verifier(world: Any) -> None:
    old = await world.verifier(**OLD)
    front = await fleet(world, old)
    answer = await front.client.generate(ids=[5], max_tokens=3, policy="fixed")
    assert len(answer.ids) == 3
