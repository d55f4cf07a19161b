"""Weights in bfloat16 and int8 beside float32: what is measured runs small, and is what its schema says."""

from collections.abc import Callable
from typing import Any

import pytest

from outrider.compiling.toolchain import find_compiler, processor_flags


@pytest.mark.long
@pytest.mark.skipif(
    "avx512f" not in processor_flags().split() or find_compiler() is None,
    reason="the kernel takes AVX-512 and g++",
)
def test_drafts_change_no_id_and_weights_stored_in_bfloat16_give_the_ids_of_float32(
    bench: Callable[..., dict[str, Any]],
) -> None:
    flags = ("--prompts", "2", "--prompt", "40", "--tokens", "12", "--repeats", "1", "--width", "64")
    result = bench("weights", *flags)
    sizes = result["weights_mb"]
    assert 2 * sizes["bfloat16"] < sizes["float32"]
    assert 3 * sizes["int8"] < sizes["float32"]
    for mode in result["figures"].values():
        for figures in mode.values():
            assert figures["identical"] == result["streams"] == 2
        assert mode["bfloat16"]["streams_equal_to_float"] == 2
        assert mode["bfloat16"]["other_ids_per_1000"] == 0
