"""Puts helpers, tests/verifier/support, where tests can import them, and has tests begin in NumPy."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from speculative.sampling_kernel import use_kernel

sys.path.insert(0, str(Path(__file__).parent / "support"))


@pytest.fixture(autouse=True)
def numpy_at_first() -> Iterator[None]:
    """Tests begin without a kernel, whether or not a test before them had the process use one."""
    used = use_kernel(None)
    yield
    use_kernel(used)
