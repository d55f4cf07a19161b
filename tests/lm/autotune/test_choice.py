"""Kernels are chosen from measured times alone: tables in, kernels by number of rows out."""

import pytest

from outrider.lm.autotune.choice import (
    MEASURED_ROWS,
    UNMEASURED,
    KernelChoice,
    KernelTimes,
    LinearKernel,
    WeightLayout,
    choose_kernels,
)

ROW, COLUMN, BLOCKED, PADDED = LinearKernel


def table(row: list[float], column: list[float], blocked: list[float], padded: list[float]) -> KernelTimes:
    """Times of the four kernels at the first measured numbers of rows."""
    columns = dict(zip(LinearKernel, (row, column, blocked, padded), strict=True))
    return {kernel: dict(zip(MEASURED_ROWS, spent, strict=False)) for kernel, spent in columns.items()}


ALIKE = [1.0, 1.2, 1.5, 2.0, 3.0, 9.0]


def test_of_equal_kernels_the_simplest_is_taken_for_all_rows() -> None:
    nearly = [0.98 * spent for spent in ALIKE]
    choice = choose_kernels(table(ALIKE, ALIKE, nearly, nearly), 2)
    assert choice.ranges() == {"1+": "row"}


def test_each_number_of_rows_has_its_fastest_kernel() -> None:
    times = table([1, 2, 4, 8, 16, 60], [3, 4, 5, 6, 7, 20], [5] * 4 + [9, 30], [5] * 4 + [9, 30])
    choice = choose_kernels(times, 2)
    assert [choice.kernel(rows) for rows in (1, 2, 4, 8, 16, 64, 500)] == [ROW] * 3 + [COLUMN] * 4
    assert choice.layouts == (WeightLayout.ROW, WeightLayout.COLUMN)


def test_between_measured_numbers_of_rows_times_are_interpolated() -> None:
    # Row-major is 2 + 2/3 and 3 + 1/3 at 5 and 6 rows, column-major 3 at both; 5 % belong to the simpler one.
    times = table([1, 1, 2, 5, 9, 30], [3, 3, 3, 3, 3, 9], [99] * 6, [99] * 6)
    assert choose_kernels(times, 2).ranges() == {"1-5": "row", "6+": "column"}


def test_padding_serves_few_rows_alone() -> None:
    slow = [9.0, 9.0, 9.0, 9.0, 9.0, 90.0]
    choice = choose_kernels(table(slow, slow, [5, 5, 2, 2, 3, 9], [2, 2, 2, 2, 3, 9]), 2)
    assert choice.kernel(1) is choice.kernel(2) is PADDED
    assert choice.kernel(4) is choice.kernel(64) is BLOCKED
    assert choice.layouts == (WeightLayout.BLOCKED,)


def test_a_large_weight_has_one_layout_which_few_rows_decide() -> None:
    row, column = [1.0, 1.0, 1.0, 1.0, 2.0, 9.0], [2.0, 2.0, 2.0, 2.0, 2.0, 3.0]
    times = table(row, column, [99] * 6, [99] * 6)
    assert choose_kernels(times, 2).ranges() == {"1-16": "row", "17+": "column"}
    assert choose_kernels(times, 1).ranges() == {"1+": "row"}


def test_a_second_layout_has_to_pay_for_its_memory() -> None:
    row, column = [1.0, 1.0, 1.0, 1.0, 1.0, 1.3], [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    choice = choose_kernels(table(row, [1.1, *column[1:]], [9] * 6, [9] * 6), 2)
    assert len(choice.layouts) == 1


def test_a_measurement_that_ended_early_decides_for_all_rows() -> None:
    choice = choose_kernels(table([3, 3], [1, 2], [9, 9], [9, 9]), 2)
    assert choice.ranges() == {"1+": "column"}


def test_without_any_times_onednn_multiplies() -> None:
    assert choose_kernels({kernel: {} for kernel in LinearKernel}, 2) is UNMEASURED


@pytest.mark.parametrize(
    ("kernels", "said"),
    [
        ((ROW,), {"1+": "row"}),
        ((ROW, COLUMN), {"1": "row", "2+": "column"}),
        ((PADDED, PADDED, BLOCKED, ROW), {"1-2": "padded", "3": "blocked", "4+": "row"}),
    ],
)
def test_a_choice_names_its_ranges_of_rows(kernels: tuple[LinearKernel, ...], said: dict[str, str]) -> None:
    assert KernelChoice(kernels).ranges() == said
