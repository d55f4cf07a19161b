"""Gives a model that is being loaded keys and values in int8, once its check over floats is passed."""

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from outrider.lm.kv.blocks import BLOCK
from outrider.lm.kv.pool import SlotPool

if TYPE_CHECKING:
    from outrider.lm.load.check import Trial
    from outrider.lm.runner import PackedLM

log = logging.getLogger(__name__)


def keep_in_int8(lm: "PackedLM", trial: "Trial | None", kv_mb: int | None) -> "Trial | None":
    """Gives the model, whose passes are all ragged so far, a pool of int8 of ``kv_mb`` MiB.

    Returns the trial for all other kinds of passes, which have to give what ragged passes over int8 give: the
    model's own forward, over floats, gives something else. Logs how far int8 is from floats.
    """
    layout = replace(lm.pool.layout, int8=True)
    # The floats' memory is given back before int8 takes its own.
    lm.pool = SlotPool(layout, BLOCK)
    if layout.device.type == "cuda":
        torch.cuda.empty_cache()
    lm.pool = lm.first_pool(layout, kv_mb)
    if trial is None:
        return None
    found = trial.over_int8(lm)
    fields = {"row": found.room.row, "logit": found.room.logit}
    log.info("keys and values in int8 differ from floats by", extra={"fields": fields})
    return found
