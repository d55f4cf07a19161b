"""The rereading benchmark runs small, and what it prints is what its schema says."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.slow
def test_both_orders_give_the_same_ids_in_every_mix(
    bench: Callable[..., dict[str, Any]], tiny_llama: Path
) -> None:
    flags = ("--sessions", "8", "--shared", "48", "--own", "16", "--repeats", "1", "--passes", "eager")
    found = bench("rereading", "--target", str(tiny_llama), *flags)
    assert found["identical"]
    assert set(found["mixes"]) == {"one_beginning", "most_share", "alone"}
    for mix in found["mixes"].values():  # of one repeat, the ratio of medians is the median of ratios
        waits = mix["wait_ms"]
        for name, ratio in mix["planned_over_arrival"].items():
            assert ratio == pytest.approx(waits["planned"][name] / waits["arrival"][name], abs=0.05)
