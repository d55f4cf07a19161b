"""Gives a loaded model, which was checked with floats, keys and values in int8."""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from outrider.lm.kv.blocks import BLOCK
from outrider.lm.kv.pool import SlotPool
from speculative.errors import InvalidRequest

if TYPE_CHECKING:
    from outrider.lm.load.check import Trial
    from outrider.lm.runner import PackedLM


def keep_in_int8(lm: "PackedLM", trial: "Trial | None", kv_mb: int | None) -> None:
    """Has the model keep keys and values in int8, in a pool of ``kv_mb`` MiB; no session may be open.

    Steps of static shape are checked against ragged passes over int8, since the check at load compared floats
    with the model's own forward. Raises InvalidRequest for a model that runs chains, ModelRefused where steps
    differ from ragged passes.
    """
    if lm.pool.chains_only:
        raise InvalidRequest(
            f"kv_dtype = int8 for {lm.model_type}, which verifies chains: chains keep floats alone; leave "
            "kv_dtype out"
        )
    layout = replace(lm.pool.layout, int8=True)
    # The floats' memory is given back before int8 takes its own.
    _use(lm, SlotPool(layout, BLOCK))
    if layout.device.type == "cuda":
        torch.cuda.empty_cache()
    _use(lm, lm.first_pool(layout, kv_mb))
    if lm.steps is not None and trial is not None:
        trial.over_ragged(lm).verify(lm)


def _use(lm: "PackedLM", pool: SlotPool) -> None:
    lm.pool = pool
    if lm.steps is not None:
        lm.steps.use_pool(pool)
