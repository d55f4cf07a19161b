"""A test in which something came too late is tried again, with fixtures of its own."""

from collections import Counter
from pathlib import Path

import pytest

from tests.in_time import TRIES, NotInTime, each_in_time, in_time

FOLDERS: list[Path] = []


def test_what_comes_too_late_is_tried_again(tmp_path: Path) -> None:
    FOLDERS.append(tmp_path)
    in_time(len(FOLDERS) == TRIES)
    assert len(set(FOLDERS)) == TRIES


async def test_of_many_cases_only_the_late_ones_are_checked_again() -> None:
    checked: Counter[str] = Counter()

    async def check(case: str) -> None:
        checked[case] += 1
        in_time(case == "quick" or checked[case] == TRIES)

    await each_in_time(check, ("quick", "late"))
    assert checked == {"quick": 1, "late": TRIES}


async def test_a_case_that_is_late_at_each_try_is_named_as_late() -> None:
    async def check(case: str) -> None:
        in_time(case == "quick", "26 ms")

    with pytest.raises(NotInTime, match=r"\{'late': '26 ms'\}"):
        await each_in_time(check, ("quick", "late"))


async def test_a_wrong_case_fails_at_once() -> None:
    checked: list[str] = []

    async def check(case: str) -> None:
        checked.append(case)
        assert case == "right", "wrong answer"

    with pytest.raises(AssertionError, match="wrong answer") as raised:
        await each_in_time(check, ("right", "wrong", "next"))
    assert not isinstance(raised.value, NotInTime)
    assert checked == ["right", "wrong"]
