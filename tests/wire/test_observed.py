"""What the target said, as bytes."""

import math

import pytest

from outrider.wire.observed import observed_from_wire, off_path_to_wire, tops_to_wire
from speculative.errors import InvalidRequest
from speculative.observed import OffPathRow, TopIds

TOPS = [TopIds((7, 151_935, 0), (-0.25, -2.0, -math.inf)), TopIds((1, 2, 3), (-0.5, -1e9, -1e9))]
OFF_PATH = [OffPathRow(2**64 - 1, 5, 6, (6, 7, 8))]


def test_what_is_sent_is_read() -> None:
    said = observed_from_wire(tops_to_wire(TOPS, 3), off_path_to_wire(OFF_PATH, 3), 3)
    assert said.count == 3
    assert said.tops[0] == TOPS[0]
    assert said.tops[1] == TopIds((1, 2, 3), (-0.5, -math.inf, -math.inf)), "16 bits reach to -65504"
    assert list(said.off_path) == OFF_PATH


def test_a_source_gets_as_many_as_it_asked_for() -> None:
    assert len(tops_to_wire(TOPS, 2)) == 2 * 2 * 6
    assert len(off_path_to_wire(OFF_PATH, 1)) == 8 + 4 + 4 + 4
    said = observed_from_wire(tops_to_wire(TOPS, 1), off_path_to_wire(OFF_PATH, 1), 1)
    assert (said.tops[0], said.off_path[0].top_ids) == (TopIds((7,), (-0.25,)), (6,))
    assert tops_to_wire([], 0) == off_path_to_wire([], 0) == b""


@pytest.mark.parametrize(("tops", "off_path"), [(b"12345", b""), (b"", b"1" * 21), (b"1" * 12, b"1")])
def test_bytes_that_are_no_whole_rows_are_refused(tops: bytes, off_path: bytes) -> None:
    with pytest.raises(InvalidRequest, match="bytes per token"):
        observed_from_wire(tops, off_path, 2)
