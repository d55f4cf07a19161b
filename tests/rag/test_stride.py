"""The adaptive stride follows accuracy and times."""

import pytest

from outrider.rag.loops import RagLimits
from outrider.rag.stride import MOST, AdaptiveStride, FixedStride, best_stride
from speculative.errors import InvalidRequest


@pytest.mark.parametrize(
    ("accuracy", "piece_s", "search_s", "expected"),
    [
        (0.0, 1.0, 1.0, 1),
        (0.6, 1.0, 0.0, 1),
        (0.5, 1.0, 2.0, 2),
        (0.6, 0.0, 1.0, MOST),
    ],
)
def test_the_best_stride(accuracy: float, piece_s: float, search_s: float, expected: int) -> None:
    assert best_stride(accuracy, piece_s, search_s) == expected


@pytest.mark.parametrize("accuracy", [0.1, 0.3, 0.6])
def test_the_best_stride_brings_most_verified_pieces_per_second(accuracy: float) -> None:
    def rate(stride: int) -> float:
        return (1 - accuracy**stride) / (1 - accuracy) / (stride * 0.2 + 1.5)

    assert best_stride(accuracy, 0.2, 1.5) == max(range(1, MOST + 1), key=rate)


def test_slow_searches_and_right_guesses_lengthen_the_stride_and_wrong_ones_shorten_it() -> None:
    stride = AdaptiveStride()
    assert stride.guesses == 1
    for _ in range(5):
        stride.saw(stride.guesses, stride.guesses, [0.01] * stride.guesses, 0.2)
    long = stride.guesses
    for _ in range(5):
        stride.saw(stride.guesses, 0, [0.01] * stride.guesses, 0.2)

    assert long > 3
    assert stride.guesses == 1


def test_a_fixed_stride_learns_nothing() -> None:
    stride = FixedStride(3)
    stride.saw(3, 0, [1.0] * 3, 9.0)
    assert stride.guesses == 3


@pytest.mark.parametrize(
    ("name", "value"), [("every", 0), ("guesses", 17), ("guesses", "often"), ("prefetch", -1), ("kept", 1.5)]
)
def test_limits_out_of_range_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=f"{name} is {value!r}"):
        RagLimits(**{name: value})  # type: ignore[arg-type]
