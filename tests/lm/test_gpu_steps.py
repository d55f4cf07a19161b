"""Steps on a GPU: captured graphs and the compiled kernel against ragged passes.

Needs `TRITON_INTERPRET=0` and a CUDA device; elsewhere `test_graphs.py` and `test_tree_attention_kernel.py`
stand in.
"""

import os
import random

import pytest
import torch

from outrider.lm.graphs.backend_choice import use_graphs
from outrider.lm.graphs.capture import CudaGraphs
from outrider.lm.plan import SequenceRows
from outrider.lm.runner import PackedLM
from tests.lm.families import VOCABULARY, logits_of, model_of, twin_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "0", reason="TRITON_INTERPRET=0 is not set"),
]


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "deepseek_v3"])
def test_captured_steps_give_the_logits_of_ragged_passes(family: str) -> None:
    model = model_of(family).to("cuda")
    static, ragged = PackedLM(twin_of(model), kv_mb=8), PackedLM(model, kv_mb=8)
    use_graphs(static, "triton", CudaGraphs())
    dice = random.Random(family)
    tables = {lm: [lm.table() for _ in range(3)] for lm in (static, ragged)}
    for turn in range(8):
        chosen = dice.sample(range(3), dice.randint(1, 3))
        rows = [dice.randint(1, 20 if not turn else 8) for _ in chosen]
        trees = [[dice.randrange(-1, row) for row in range(count)] for count in rows]
        tokens = [[dice.randrange(VOCABULARY) for _ in range(count)] for count in rows]
        found = []
        for lm, own in tables.items():
            given = zip(chosen, tokens, trees, strict=True)
            found.append(
                logits_of(lm, [SequenceRows(own[at], ids, tree, range(len(ids))) for at, ids, tree in given])
            )
            for at in chosen:
                own[at].commit([0])
                own[at].drop_nodes()
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
        assert torch.equal(found[0].argmax(dim=1), found[1].argmax(dim=1))
