"""A small target with room for a head's planes, and what the head and plain decoding say without a cache."""

import random
from collections.abc import Sequence
from functools import cache

import torch
from attention_head import LAYERS, AttentionHead, AttentionLayer
from core_driver import GREEDY, CoreDriver

from outrider.lm.graphs import backend_choice
from outrider.lm.kv.blocks import BLOCK
from outrider.lm.kv.pool import GuestRoom, SlotPool
from outrider.lm.outcome import OutcomeWants
from outrider.lm.plan import SequenceRows
from outrider.lm.runner import PackedLM
from speculative.params import SamplingParams
from tests.lm.families import VOCABULARY, model_of

HIDDEN = 32
PROMPT = tuple(random.Random(1).choices(range(VOCABULARY), k=2 * BLOCK))
NEW = 24
Ids = tuple[int, ...]


def target(blocks: int = 256, *, static: bool = False, heads: int = 1) -> PackedLM:
    """A target with memory for so many blocks, and room for the planes of so many heads."""
    room = GuestRoom(heads * AttentionHead.needs.planes, len(LAYERS))
    lm = PackedLM(model_of("llama", max_position_embeddings=128), guest=room)
    # Storage that has to grow (not under captured steps), and may be scarce.
    first = blocks if static else 4
    lm.pool = SlotPool(lm.pool.layout, max_slots=blocks * BLOCK, initial_slots=first * BLOCK)
    lm.wants = OutcomeWants(features=LAYERS)
    if static:
        backend_choice.use_graphs(lm, "gathered")
    return lm


BARE = target()


@cache
def layer_of(version: int) -> AttentionLayer:
    """A head's layer with weights of its own."""
    return AttentionLayer(VOCABULARY, HIDDEN, seed=version)


@cache
def fresh(layer: AttentionLayer, ids: Ids) -> list[Ids]:
    """What the layer says after these ids where nothing was computed before, and nothing kept."""
    table = BARE.table()
    outcome = BARE.forward([SequenceRows(table, ids[:-1], range(-1, len(ids) - 2), ())])
    BARE.release(table)
    assert outcome.features is not None
    with torch.inference_mode():
        return layer.fresh(ids, outcome.features)


def plain(prompt: Sequence[int], new: int = NEW, params: SamplingParams = GREEDY, seed: int = 0) -> list[int]:
    """What plain decoding gives."""
    return list(_plain(tuple(prompt), new, params, seed))


@cache
def _plain(prompt: Ids, new: int, params: SamplingParams, seed: int) -> Ids:
    driver = CoreDriver(BARE, reuse_prefixes=False)
    session = driver.open(prompt, new, params, seed)
    driver.run()
    return tuple(driver.generated(session))
