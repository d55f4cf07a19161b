"""The Triton kernel in its interpreter, over large and odd steps, against its reference in plain torch."""

import mmap
from importlib.util import find_spec

import pytest
import torch

from benchmarks.gpu_first.attention_case import AttentionCase, Heads
from outrider.lm.attention.kernels.gathered import attend_gathered
from outrider.lm.attention.metadata import SPLIT_ITEMS

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

FEW = Heads(heads=8, key_heads=1, width=16, value_width=16)
INT8 = Heads(heads=8, key_heads=2, width=24, value_width=16, int8=True)
WINDOWED = Heads(heads=8, key_heads=1, width=16, value_width=16, window=40, softcap=2.0, sinks=True)
TREES = {
    "more tiles than items": ((20, 0, 1),) * (SPLIT_ITEMS + 6),
    "more large tiles than items": ((12, 0, 9),) * (SPLIT_ITEMS // 2 + 2),
    "one long session among many": ((1500, 2, 3), *(((17, 0, 1),) * (SPLIT_ITEMS + 2))),
    "one row beyond a mask of 256": ((30, 0, 257),),
    "a chunk of a prompt beside trees": ((40, 0, 300), (10, 3, 9), (90, 0, 1)),
}


@pytest.mark.parametrize("heads", [FEW, WINDOWED, INT8], ids=["plain", "windowed", "int8"])
@pytest.mark.parametrize("name", TREES)
def test_large_and_odd_steps_give_what_plain_torch_gives(name: str, heads: Heads) -> None:
    from outrider.lm.attention.kernels.tree_attention import attend_tiles

    case = AttentionCase(heads, TREES[name], torch.float32, "cpu")
    with torch.inference_mode():
        expected, found = case.attend(attend_gathered), case.attend(attend_tiles)

    assert expected.isfinite().all()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert not found[case.rows :].any()


def test_keys_that_lie_beyond_32_bits_are_found() -> None:
    from outrider.lm.attention.kernels.tree_attention import attend_tiles

    case = AttentionCase(
        Heads(heads=4, key_heads=4, width=16, value_width=16), ((50, 3, 4),), torch.float16, "cpu"
    )
    with torch.inference_mode():
        expected = case.attend(attend_tiles)
        case.keys, case.values = apart(case.keys), apart(case.values)
        found = case.attend(attend_tiles)

    assert case.keys.stride(0) * 3 > 2**31
    torch.testing.assert_close(found, expected)


def apart(plane: torch.Tensor) -> torch.Tensor:
    """The plane's contents with its heads 2**30 elements apart, in memory of which little is touched."""
    heads, slots, width = plane.shape
    stride = 2**30
    memory = mmap.mmap(
        -1, (heads * stride) * plane.element_size(), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )
    far = torch.frombuffer(memory, dtype=plane.dtype).as_strided((heads, slots, width), (stride, width, 1))
    return far.copy_(plane)
