"""What several tests of the core share."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from numpy.typing import NDArray

from speculative.sampling_kernel import use_kernel

Scores = NDArray[np.floating[Any]]

settings.register_profile(
    "core",
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],  # which says how busy the machine is
)
settings.load_profile("core")


@pytest.fixture(autouse=True)
def numpy_alone() -> Iterator[None]:
    """The core's tests compute in NumPy, whether or not a test before them had the process use a kernel."""
    used = use_kernel(None)
    yield
    use_kernel(used)


@pytest.fixture(scope="session")
def assert_law(chi_square_limit: Callable[[int], float]) -> Callable[[Sequence[int], Scores], None]:
    """Asserts that ids were chosen by the softmax of scores (chi-square: one seed in a thousand fails)."""

    def check(chosen: Sequence[int], scores: Scores) -> None:
        counts = np.bincount(chosen, minlength=len(scores))
        weights = np.exp(scores - scores.max())
        expected = len(chosen) * weights / weights.sum()
        assert not counts[expected == 0].any()
        support = expected > 0
        statistic = float(((counts[support] - expected[support]) ** 2 / expected[support]).sum())
        assert statistic < chi_square_limit(max(1, int(support.sum()) - 1))

    return check


@pytest.fixture(scope="session")
def chi_square_limit() -> Callable[[int], float]:
    """The chi-square that one sample in a thousand exceeds, by degrees of freedom (Wilson, Hilferty)."""

    def limit(degrees: int) -> float:
        spread = 2 / (9 * degrees)
        return float(degrees * (1 - spread + 3.0902 * spread**0.5) ** 3)

    return limit
