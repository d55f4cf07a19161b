"""The torch twin of the noise draws the very integers of the pure core."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.lm.noise import raw_bits
from speculative import noise

WORD = st.integers(0, 2**64 - 1)


@given(seed=WORD, position=WORD, size=st.integers(1, 37))
def test_any_seed_and_position_give_the_same_bits(seed: int, position: int, size: int) -> None:
    drawn = raw_bits(seed, position, size)

    assert np.array_equal(drawn.numpy().view(np.uint64), noise.raw_bits(seed, position, size))


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1, 2**63, 2**64 - 1])
@pytest.mark.parametrize("position", [0, 1, 2**32, 2**63, 2**64 - 1])
def test_the_ends_of_the_ranges_give_the_same_bits(seed: int, position: int) -> None:
    drawn = raw_bits(seed, position, 4099)

    assert np.array_equal(drawn.numpy().view(np.uint64), noise.raw_bits(seed, position, 4099))
