import pytest
from hypothesis import given
from hypothesis import strategies as st

from speculative.history import History

tokens = st.lists(st.integers(0, 5), max_size=8)


def facts(history: History) -> tuple[set[int], dict[int, float]]:
    seen = history.seen().tolist()
    ids, counts = (array.tolist() for array in history.generated())
    assert len(set(seen)) == len(seen)
    assert len(set(ids)) == len(ids)
    return set(seen), dict(zip(ids, counts, strict=True))


@given(prompt=tokens, output=tokens, pushed=tokens, path=tokens)
def test_a_path_counts_as_if_it_were_committed(
    prompt: list[int], output: list[int], pushed: list[int], path: list[int]
) -> None:
    history = History.of(prompt + output, len(prompt))
    for token in pushed:
        facts(history)
        history.extend([token])
    generated = output + pushed + path
    expected = set(prompt + generated), {token: float(generated.count(token)) for token in generated}
    assert facts(history.with_path(path)) == expected
    assert facts(history.with_path(path[:3]).with_path(path[3:])) == expected
    assert facts(History.of(prompt + generated, len(prompt))) == expected


def test_looking_down_one_branch_leaves_no_trace_on_another() -> None:
    history = History.of([1, 2, 3], 1)
    before = facts(history)
    assert facts(history.with_path((3, 4)))[1] == {2: 1, 3: 2, 4: 1}
    assert facts(history.with_path((5,)))[1] == {2: 1, 3: 1, 5: 1}
    assert facts(history) == before


def test_a_path_is_not_used_after_a_commit_below_it() -> None:
    history = History.of([1, 2], 1)
    path = history.with_path((3,))
    history.extend([4])
    with pytest.raises(AssertionError, match="was used after"):
        path.seen()


def test_nothing_is_pushed_onto_a_drafted_path() -> None:
    with pytest.raises(AssertionError, match="drafted path"):
        History.of([1], 1).with_path((2,)).extend([3])
