"""Checks a compiled head against the eager one: expected hidden states and logits of a small draft tree."""

from array import array

import torch
from torch import Tensor

from outrider.lm.compiled.head_kernel import CompiledHead, DraftMemory, DraftRows
from outrider.lm.heads.pair_head import PairHead

_COMMITTED = 37
"""Committed tokens of the session that is tried, in two runs of slots."""
_RUNS = ((48, 73), (16, 28))
_SLOTS = 80
_LEVELS: tuple[tuple[int, ...], ...] = ((-1,), (0, 0), (2, 1, 2))
"""The row of an earlier level that each row of a level continues."""
_TOLERANCE = 1e-3
"""Largest difference of logits, as a share of their spread."""


@torch.inference_mode()
def check_head(compiled: CompiledHead, head: PairHead, vocabulary_size: int) -> str | None:
    """Why the compiled head differs from the eager one; None where they agree up to rounding."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary_size, (_COMMITTED + 1,), generator=generator)
    features = torch.randn(_COMMITTED, *compiled.feature_shape, generator=generator)
    attention = head.layer.self_attn
    planes = [torch.zeros(compiled.key_heads, _SLOTS, attention.head_dim) for _ in range(2)]
    slots = [slot for low, high in _RUNS for slot in range(low, high)]
    size = features.stride(0) * features.element_size()
    # Token i and the hidden states of the position before it make the pair in slot i; slot 0 has none.
    pairs = array("q")
    for at in range(1, _COMMITTED):
        before = features.data_ptr() + (at - 1) * size
        pairs.extend((int(ids[at]), at - 1, slots[at], before, features.stride(1)))
    compiled.write(planes, pairs)
    memory = DraftMemory(compiled, _RUNS, features[-1], sum(map(len, _LEVELS)))
    fused = head.fuse(features)
    paths: list[tuple[Tensor, Tensor]] = []  # tokens and hidden states of each row's pairs
    for depth, parents in enumerate(_LEVELS):
        drawn = torch.randint(vocabulary_size, (len(parents),), generator=generator)
        tokens = ids[-1:] if not depth else drawn
        rows = DraftRows(memory, tokens.tolist(), parents, _COMMITTED - 1 + depth, None, ())
        (logits,) = compiled.level(planes, [rows])
        found = torch.as_tensor(logits)
        for at, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            known = (ids[1:-1], fused) if parent < 0 else paths[parent]
            path = torch.cat((known[0], token[None])), known[1]
            expected = head(path[0][None], path[1][None])[0]
            paths.append((path[0], torch.cat((path[1], expected[-1:]))))
            if (why := _differs(head.logits(expected[-1:])[0], found[at])) is not None:
                return f"the compiled head differs from the eager one at level {depth + 1}: {why}"
    return None


def _differs(wanted: Tensor, found: Tensor) -> str | None:
    drafted = wanted.isfinite()
    if not torch.equal(drafted, found.isfinite()):
        return "other ids have logits"
    spread = float(wanted[drafted].max() - wanted[drafted].min()) or 1.0
    most = float((wanted[drafted] - found[drafted]).abs().max())
    if most <= _TOLERANCE * spread:
        return None
    return f"a logit by {most:.2g}, where they spread over {spread:.2g}"
