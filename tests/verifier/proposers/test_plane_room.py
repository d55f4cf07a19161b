"""The room that heads ask for beside a target's keys and values: given at load, counted, and refused."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
from attention_head import HEADS, LAYERS, WIDTH, AttentionHead, AttentionLayer
from core_driver import CoreDriver
from harness import serving
from plane_target import HIDDEN, NEW, PROMPT, fresh, layer_of, plain, target

from outrider.lm.kv.blocks import BLOCK
from outrider.lm.kv.pool import GuestRoom
from outrider.lm.parallel.leader import _figures, follow_leader
from outrider.lm.parallel.messages import RankEnd, RankHello, to_words
from outrider.lm.parallel.rank_group import RankInfo, RankLost
from outrider.lm.runner import PackedLM
from tests.conftest import TINY_VOCABULARY
from tests.lm.families import model_of
from verifier_service.loading import load_target
from verifier_service.proposers import BATCHED_PROPOSERS
from verifier_service.proposers.batched import ProposerConfig, ProposerPlan
from verifier_service.settings import VerifierSettings

ROOM = GuestRoom(AttentionHead.needs.planes, len(LAYERS))


def test_a_proposer_with_planes_that_also_wants_tops_is_refused() -> None:
    head = AttentionHead(layer_of(0))
    head.needs = replace(AttentionHead.needs, tops=2)
    with pytest.raises(ValueError, match="'bigram' needs planes and tops"):
        CoreDriver(target(), {"bigram": head})


def test_a_target_without_room_for_the_planes_is_refused() -> None:
    with pytest.raises(ValueError, match="loaded without room for the planes"):
        CoreDriver(PackedLM(model_of("llama")), {"bigram": AttentionHead(layer_of(0))})


def test_two_heads_have_planes_of_their_own() -> None:
    lm = target(heads=2)
    heads = {"bigram": AttentionHead(layer_of(0)), "other": AttentionHead(layer_of(9))}
    driver = CoreDriver(lm, heads)
    session = driver.open(PROMPT, NEW, sources=("bigram", "other"))
    driver.run()
    assert driver.generated(session) == plain(PROMPT)
    assert not driver.core.proposers.muted
    for ids, said in heads["bigram"].said:
        assert said == fresh(layer_of(0), ids)[: len(said)]


def test_memory_counts_the_planes_and_what_lies_beside_a_block() -> None:
    bare, roomy = PackedLM(model_of("llama"), kv_mb=1), PackedLM(model_of("llama"), kv_mb=1, guest=ROOM)
    assert roomy.pool.layout.layers == bare.pool.layout.layers == 4
    more = 4 * (2 * HEADS * WIDTH + len(LAYERS) * HIDDEN // BLOCK)
    assert roomy.pool.layout.slot_bytes == bare.pool.layout.slot_bytes + more
    assert roomy.pool.max_slots * roomy.pool.layout.slot_bytes <= 2**20
    assert roomy.pool.max_slots < bare.pool.max_slots


class ServedHead(AttentionHead):
    """A head for the tiny model, made as the verifier makes it: by its plan."""

    made: ClassVar[list["ServedHead"]] = []

    def __init__(self) -> None:
        super().__init__(AttentionLayer(TINY_VOCABULARY, HIDDEN))
        self.made.append(self)


def plan_head(config: ProposerConfig) -> ProposerPlan:
    return ProposerPlan(ServedHead.needs, lambda target: ServedHead())


async def test_a_verifier_loads_its_target_with_room_for_the_planes_of_its_proposers(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ServedHead, "made", [])
    monkeypatch.setitem(BATCHED_PROPOSERS, "head", "test_plane_room:plan_head")
    monkeypatch.setitem(sys.modules, "test_plane_room", sys.modules[__name__])
    chosen = {"proposers": "head", "threads": 1, "kv_mb": 4}
    lm = load_target(VerifierSettings(model=str(tiny_llama), **chosen))
    assert lm.pool.layout.guests == len(AttentionHead.needs.planes)
    async with serving(lm, prefix_cache=True, budget="fixed", **chosen) as verifier:
        expected = (await verifier.generate(PROMPT, new=20)).ids
        answer = await verifier.generate(PROMPT, new=20, sources=[("head", "")])
        assert verifier.metric("proposers_muted") == 0
    assert answer.ids == expected
    (head,) = ServedHead.made
    assert len(head.said) > 0


class SaysHello:
    """What another rank hears of a first rank with this model."""

    info = RankInfo(1, 2, 1)

    def __init__(self, lm: PackedLM) -> None:
        self._words = to_words(RankHello(_figures(lm))) + to_words(RankEnd())

    def receive(self) -> list[int]:
        return self._words


def test_ranks_that_differ_in_the_planes_of_guests_do_not_work_together() -> None:
    planes = 2 * GuestRoom(((2, 8), (2, 8))).planes
    guest = PackedLM(model_of("llama", num_hidden_layers=2), kv_mb=1, guest=GuestRoom(planes))
    alike = PackedLM(model_of("llama", num_hidden_layers=4), kv_mb=1)
    assert guest.pool.layout.planes == alike.pool.layout.planes
    follow_leader(guest, SaysHello(guest))  # type: ignore[arg-type]
    with pytest.raises(RankLost, match="another model or memory"):
        follow_leader(guest, SaysHello(alike))  # type: ignore[arg-type]
