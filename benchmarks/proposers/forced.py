"""How often a head chooses the target's token on given contexts, greedy and with a session's noise.

Teacher-forced: text that the target wrote is given, and the head drafts behind every place of it. Both
choices are made on the same contexts, so the sampled share differs from the greedy one by the noise alone.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from outrider.lm.heads.config import HeadConfig
from outrider.lm.heads.hydra import HydraHeads
from outrider.lm.heads.look_ahead import LookAheadEmbeddings
from outrider.lm.heads.medusa import MedusaHeads
from outrider.lm.heads.published import load_head
from speculative.noise import gumbel
from training.heads.frozen import FrozenTarget
from training.heads.look_ahead import TrainedLookAhead
from training.heads.unrolled import TrainedHead, layers_of, unrolled

TEMPERATURE = 0.8


@torch.inference_mode()
def agreement(
    target: FrozenTarget,
    head_folder: Path,
    texts: Sequence[Sequence[int]],
    prompts: Sequence[int],
    depth: int,
) -> dict[str, Any]:
    """Shares of equal choices by place of a draft.

    Args:
        texts: prompts with what the target wrote behind them.
        prompts: length of each prompt, in tokens.
        depth: places of a draft; at most the number of Medusa's or Hydra's heads, or of look-ahead tokens.

    Returns:
        `greedy` and `sampled` by place, their ratio at the first place, and the number of contexts.
    """
    loaded = load_head(HeadConfig.read(str(head_folder)), target.parts)
    if isinstance(loaded, LookAheadEmbeddings):
        loaded = TrainedLookAhead.trained(target, loaded)
    head = cast(TrainedHead, loaded.eval())
    if isinstance(head, MedusaHeads | HydraHeads | TrainedLookAhead):
        depth = min(depth, len(head))
    equal = np.zeros((2, depth), dtype=np.int64)
    contexts = 0
    for seed, (text, start) in enumerate(zip(texts, prompts, strict=True)):
        ids = torch.tensor([list(text)])
        states = target.states(ids, layers_of(head))
        roots = torch.arange(start - 1, len(text) - depth - 1)
        contexts += len(roots)
        for step, (logits, _) in enumerate(unrolled(head, ids, states.read, depth, roots)):
            drafted = logits[0].float()
            wanted = target.parts.lm_head(states.last[:, roots + step + 1])[0].float()
            noise = np.stack([gumbel(seed, int(root) + step + 2, wanted.shape[1]) for root in roots])
            equal[0, step] += int((drafted.argmax(-1) == wanted.argmax(-1)).sum())
            equal[1, step] += int((_noisy(drafted, noise) == _noisy(wanted, noise)).sum())
    greedy, sampled = (equal / max(1, contexts)).round(4).tolist()
    return {
        "greedy": greedy,
        "sampled": sampled,
        "sampled_over_greedy": round(sampled[0] / greedy[0], 3) if greedy[0] else None,
        "contexts": contexts,
    }


def _noisy(logits: torch.Tensor, noise: np.ndarray[Any, np.dtype[np.float64]]) -> torch.Tensor:
    return (logits.log_softmax(-1).double() / TEMPERATURE + torch.from_numpy(noise)).argmax(-1)
