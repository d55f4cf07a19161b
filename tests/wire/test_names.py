"""Valid names of sources, and epochs that are accepted."""

import pytest

from outrider.wire.epochs import DAY_MS, RANDOM_BITS, checked_epoch
from outrider.wire.names import checked_source_name
from speculative.errors import InvalidRequest

NOW_MS = 1_700_000_000_000


@pytest.mark.parametrize("name", ["a", "drafter", "n-gram index/2", "é" * 64])
def test_a_name_is_up_to_64_printable_characters(name: str) -> None:
    assert checked_source_name(name) == name


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", "0 characters; 1 to 64"),
        ("x" * 65, "65 characters; 1 to 64"),
        ("a,b", "no comma"),
        ("a\nb", "printable"),
        ("a\u202eb", "printable"),
        (" a", "space at either end"),
        ("a ", "space at either end"),
        ("target", "what the target itself is called"),
    ],
)
def test_an_ambiguous_or_unprintable_name_is_refused(name: str, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        checked_source_name(name)


@pytest.mark.parametrize("upper", [0, 4, NOW_MS, NOW_MS + DAY_MS])
def test_an_epoch_of_the_past_or_of_a_clock_that_is_a_little_ahead_is_taken(upper: int) -> None:
    assert checked_epoch(upper << RANDOM_BITS | 5, NOW_MS) == upper << RANDOM_BITS | 5


@pytest.mark.parametrize("epoch", [(NOW_MS + DAY_MS + 1) << RANDOM_BITS, 2**64 - 1])
def test_an_epoch_of_the_far_future_is_refused(epoch: int) -> None:
    with pytest.raises(InvalidRequest, match=f"epoch {epoch:016x} is .* days ahead"):
        checked_epoch(epoch, NOW_MS)
