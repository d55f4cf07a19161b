"""What several tests of the core share."""

from collections.abc import Callable

import pytest
from hypothesis import settings

settings.register_profile("core", derandomize=True, deadline=None, database=None)
settings.load_profile("core")


@pytest.fixture(scope="session")
def chi_square_limit() -> Callable[[int], float]:
    """The chi-square that one sample in a thousand exceeds, by degrees of freedom (Wilson, Hilferty)."""

    def limit(degrees: int) -> float:
        spread = 2 / (9 * degrees)
        return float(degrees * (1 - spread + 3.0902 * spread**0.5) ** 3)

    return limit
