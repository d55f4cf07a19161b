"""The upgrade benchmark runs small, end to end, as its schema says: this checkout is both releases."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(630)
def test_every_process_rolls_there_and_back_and_no_stream_notices(
    bench: Callable[..., dict[str, Any]],
) -> None:
    small = ("--streams", "4", "--tokens", "30", "--prompt", "40", "--beside", "0.2")
    result = bench(
        "upgrade", "--check", "--previous", str(ROOT), "--orders", "documented", *small, timeout_s=600
    )
    assert result["rolls"] == 14
    assert result["identical"] == result["streams"] >= 4
    assert (result["duplicates"], result["gaps"], result["failed"]) == (0, 0, 0)
