"""Chooses how a target runs: packed passes with trees, or chains where a packed pass refuses the model."""

import logging
from collections.abc import Callable

from outrider.lm.chains.chain_lm import ChainLM
from outrider.lm.load.model import layers_with_states
from outrider.lm.runner import PackedLM
from speculative.errors import ModelRefused

log = logging.getLogger(__name__)


def trees_or_chains(source: str, load: Callable[[type[PackedLM]], PackedLM]) -> PackedLM:
    """What ``load`` makes of PackedLM, or of ChainLM where packed passes refuse the model at ``source``.

    A model whose config names layers with states is loaded for chains at once. Raises InvalidRequest if there
    is no such model, ModelRefused, with both reasons where there are two, if chains refuse the model too.
    """
    if kinds := layers_with_states(source):
        lm = load(ChainLM)
        why = f"its {' and '.join(kinds)} layers keep a state, which has one past"
    else:
        try:
            return load(PackedLM)
        except ModelRefused as refusal:
            # The text alone: the error's frames hold the model, which is loaded again now.
            why, model_type = str(refusal), refusal.model_type
        try:
            lm = load(ChainLM)
        except ModelRefused as refusal:
            also = str(refusal)
            raise ModelRefused(why if also == why else f"{why}; {also}", model_type) from None
    fields = {"model_type": lm.model_type, "passes": lm.passes, "why": why}
    log.warning("the target verifies chains of drafts, not trees", extra={"fields": fields})
    return lm
