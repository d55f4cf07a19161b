"""A causal language model that has learnt mask ids, and so drafts several tokens in one pass."""

import dataclasses

from drafter_service.drafters.causal_lm import CausalLMDrafter
from outrider.lm.load.masks import mask_ids
from outrider.lm.runner import PackedLM
from speculative.errors import ModelRefused


class BlockDrafter(CausalLMDrafter):
    """Drafts with a model that `outrider distil --kind block` made. Raises ModelRefused for another model."""

    def __init__(self, lm: PackedLM) -> None:
        super().__init__(lm)
        masks = mask_ids(lm.model.config, lm.vocabulary_size)
        if not masks:
            raise ModelRefused(
                f"{lm.name} has no mask ids, so it cannot write a block: make such a model with "
                "`outrider distil --kind block`, or leave --drafter out",
                lm.model_type,
            )
        self.abilities = dataclasses.replace(
            self.abilities,
            width=masks.start,
            bound=min(self.abilities.bound, masks.start),
            masks=tuple(masks),
        )
