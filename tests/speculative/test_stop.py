import pytest
from hypothesis import given
from hypothesis import strategies as st

from speculative.errors import InvalidRequest
from speculative.stop import FinishReason, StopChecker, cut_at_stop, stop_bytes

BYTES = {
    0: b"",
    1: b"",
    2: b"a",
    3: b"b",
    4: b"ab",
    5: b"\n",
    6: b"ba",
    7: "é".encode()[:1],
    8: "é".encode()[1:],
}
EOS = frozenset({1})


def stop_checker(
    *, limit: int = 100, stops: tuple[bytes, ...] = (), ids: tuple[int, ...] = (2,), prompt: int = 1
) -> StopChecker:
    return StopChecker(EOS, limit, stops, BYTES.__getitem__, ids, prompt)


def test_an_end_of_sequence_id_is_the_last_committed_one() -> None:
    assert cut_at_stop(stop_checker(), (2, 3, 1, 2, 3)) == ((2, 3, 1), FinishReason.STOP)


def test_a_run_within_bounds_is_committed_whole() -> None:
    end = stop_checker()
    assert cut_at_stop(end, (2, 3, 2)) == ((2, 3, 2), None)
    assert end.length == 4
    assert end.finished is None


def test_nothing_past_the_limit_is_committed() -> None:
    assert cut_at_stop(stop_checker(limit=3), (2, 3, 2, 2)) == ((2, 3), FinishReason.LENGTH)


@pytest.mark.parametrize("stops", [(), (b"ab",)])
def test_stopping_goes_before_length_at_the_same_id(stops: tuple[bytes, ...]) -> None:
    last = 4 if stops else 1
    assert cut_at_stop(stop_checker(limit=3, stops=stops), (5, last)) == ((5, last), FinishReason.STOP)


def test_a_stop_string_may_span_ids_and_end_inside_one() -> None:
    assert cut_at_stop(stop_checker(stops=(b"a\nb",)), (2, 5, 6, 2)) == ((2, 5, 6), FinishReason.STOP)


def test_special_ids_have_no_bytes_and_do_not_break_a_stop_string() -> None:
    assert cut_at_stop(stop_checker(stops=(b"ab",)), (2, 0, 3)) == ((2, 0, 3), FinishReason.STOP)


def test_half_a_character_does_not_hide_a_stop_string() -> None:
    assert cut_at_stop(stop_checker(stops=("é".encode(),)), (2, 7, 8, 2)) == ((2, 7, 8), FinishReason.STOP)


def test_the_prompts_bytes_and_ids_end_nothing() -> None:
    end = StopChecker(EOS, 100, (b"ab",), BYTES.__getitem__, (1, 4, 2), 3)
    assert end.finished is None
    assert end.push(3) is None


@pytest.mark.parametrize(
    ("ids", "limit", "reason"),
    [
        ((2, 2, 1), 100, FinishReason.STOP),
        ((2, 2, 3), 100, FinishReason.STOP),
        ((2, 3, 3), 3, FinishReason.LENGTH),
        ((2, 3, 3), 100, None),
    ],
)
def test_ids_that_already_end_the_request_say_so(
    ids: tuple[int, ...], limit: int, reason: FinishReason | None
) -> None:
    assert stop_checker(ids=ids, limit=limit, stops=(b"ab",)).finished is reason


def test_stop_strings_need_a_tokenizer() -> None:
    with pytest.raises(InvalidRequest, match="tokenizer"):
        StopChecker(EOS, 10, (b"a",), None, (2,), 1)


def test_pushing_past_the_end_is_our_own_mistake() -> None:
    end = stop_checker(limit=2)
    end.push(2)
    with pytest.raises(AssertionError, match="after the end"):
        end.push(2)


@pytest.mark.parametrize("stops", [["x"] * 17, [""], ["é" * 129], ["x" * 1000]])
def test_odd_stop_strings_are_refused(stops: list[str]) -> None:
    with pytest.raises(InvalidRequest, match="stop"):
        stop_bytes(stops)


def test_stop_strings_are_matched_as_utf_8() -> None:
    assert stop_bytes(["é", "\n\n"]) == ("é".encode(), b"\n\n")


def test_a_reason_reads_as_in_the_contract() -> None:
    assert [str(reason) for reason in FinishReason] == ["stop", "length", "cancelled", "error"]


@given(
    tokens=st.lists(st.sampled_from(sorted(BYTES)), min_size=1, max_size=12),
    stops=st.lists(st.sampled_from([b"a", b"ab", b"bab", b"a\nb", b"\n\n", b"abab"]), max_size=3),
    limit=st.integers(2, 14),
    cut=st.integers(0, 12),
)
def test_where_a_request_ends_is_a_function_of_its_ids(
    tokens: list[int], stops: list[bytes], limit: int, cut: int
) -> None:
    """Against the definition read plainly; and a session rebuilt half way ends at the same id."""

    def ends_at(count: int) -> FinishReason | None:
        text = b"".join(BYTES[token] for token in tokens[:count])
        if tokens[count - 1] in EOS or any(stop in text for stop in stops):
            return FinishReason.STOP
        return FinishReason.LENGTH if 1 + count >= limit else None

    expected = next(
        ((n, reason) for n in range(1, len(tokens) + 1) if (reason := ends_at(n))), (len(tokens), None)
    )
    end = stop_checker(limit=limit, stops=tuple(stops))
    committed, reason = cut_at_stop(end, tokens)
    assert (len(committed), reason) == expected
    assert end.finished is reason
    if cut < len(committed):
        rebuilt = stop_checker(limit=limit, stops=tuple(stops), ids=(2, *tokens[:cut]))
        assert rebuilt.finished is None
        assert cut_at_stop(rebuilt, tokens[cut:]) == (committed[cut:], reason)


def test_a_stop_string_counts_only_where_it_is_completed_late_enough() -> None:
    def run(min_tokens: int, *tokens: int) -> tuple[tuple[int, ...], FinishReason | None]:
        return cut_at_stop(
            StopChecker(EOS, 100, (b"ab", b"b"), BYTES.__getitem__, (2,), 1, min_tokens), tokens
        )

    assert run(2, 2, 3, 2) == ((2, 3), FinishReason.STOP)
    assert run(3, 2, 3, 2, 2, 3) == ((2, 3, 2, 2, 3), FinishReason.STOP)
    assert run(3, 4, 3, 0, 2) == ((4, 3, 0, 2), None), "an id without bytes completes nothing"
    assert run(3, 2, 2, 3) == ((2, 2, 3), FinishReason.STOP), "it may begin before"


def test_replayed_ids_count_towards_min_tokens() -> None:
    ids = (2, 3, 5, 3)
    assert StopChecker(EOS, 100, (b"b",), BYTES.__getitem__, ids, 1, 3).finished is FinishReason.STOP
    assert StopChecker(EOS, 100, (b"b",), BYTES.__getitem__, ids, 1, 4).finished is None
