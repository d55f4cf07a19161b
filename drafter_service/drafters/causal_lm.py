"""A Hugging Face causal language model as a drafter: `outrider.lm` behind the worker's interface."""

from collections.abc import Sequence
from typing import Self

import numpy as np
from numpy.typing import NDArray

from drafter_service.session import Abilities, Cache, PassRows
from drafter_service.settings import DrafterSettings
from outrider.lm.autotune.threads import ThreadBounds
from outrider.lm.device.placement import GpuOptions, kv_mb_of
from outrider.lm.kv.table import SlotTable
from outrider.lm.load.part import ModelPart
from outrider.lm.plan import SequenceRows
from outrider.lm.runner import PackedLM
from outrider.runtime.threads import most_helped_threads, most_threads
from outrider.skip_set import read_skips
from outrider.tokens import TokenTable


class CausalLMDrafter:
    """Drafts with any causal language model that the verifier could serve too, or with some of its layers."""

    def __init__(self, lm: PackedLM) -> None:
        tokens = None if lm.tokenizer_json is None else TokenTable.from_json(lm.tokenizer_json)
        self.lm = lm
        self.model = lm.name
        self.numerics = lm.numerics
        self.tokenizer_digest = "" if tokens is None else tokens.digest
        self.abilities = Abilities(
            width=lm.vocabulary_size,
            bound=lm.vocabulary_size if tokens is None else min(tokens.size, lm.vocabulary_size),
            max_length=lm.max_length,
            eos_ids=frozenset(lm.eos_ids),
        )

    @classmethod
    def load(cls, settings: DrafterSettings) -> Self:
        """Loads the model.

        Raises InvalidRequest without a model or for layers that are not there, ModelRefused if it would draft
        wrongly, or if its layers cannot be skipped in part.
        """
        lm = PackedLM.load(
            settings.model,
            device=settings.device,
            dtype=settings.dtype,
            threads=(
                ThreadBounds(most_threads(), most_helped_threads())
                if settings.threads == "auto"
                else settings.threads
            ),
            kv_mb=kv_mb_of(settings.kv_mb),
            cache_dir=settings.cache_dir,
            part=ModelPart(read_skips(settings.skip), settings.exit_layer),
            gpu=GpuOptions(
                cuda_graphs=settings.cuda_graphs,
                memory_utilization=settings.gpu_memory_utilization,
                capture_s=settings.capture_s,
                compile_layers=settings.passes != "eager",
                max_rows=settings.most_rows,
            ),
            weight_dtype=settings.weight_dtype,
        )
        lm.capture_steps()
        lm.compile_passes(settings.passes, settings.cache_dir)
        return cls(lm)

    def open(self, reserve: int) -> SlotTable:
        """Opens an empty cache."""
        return self.lm.table(reserve)

    def close(self, cache: Cache) -> None:
        """Frees the cache's memory."""
        self.lm.release(_table(cache))

    def rewind(self, cache: Cache, length: int) -> None:
        """Shortens the cache: slot i holds position i, so that setting the length suffices."""
        cache.drop_nodes()
        cache.length = length

    def forward(self, batch: Sequence[tuple[Cache, PassRows]]) -> NDArray[np.float32]:
        """One packed pass over all sessions."""
        shares = [SequenceRows(_table(cache), rows.tokens, rows.parents, rows.want) for cache, rows in batch]
        return self.lm.forward(shares).rows()

    def shut_down(self) -> None:
        """Ends the model's compiler, should it still compile."""
        self.lm.close()

    @property
    def cached_tokens(self) -> int:
        """Number of cache slots that belong to sessions."""
        return self.lm.pool.used_slots


def _table(cache: Cache) -> SlotTable:
    assert isinstance(cache, SlotTable), "caches come from `open`"
    return cache
